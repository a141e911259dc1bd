"""Recipes of `meshwright train`: their fields, the rules of these, and how they are read. Torch-free."""
