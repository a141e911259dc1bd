"""Collectives, redistribution between layouts, and a log of the collectives."""
