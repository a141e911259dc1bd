"""Checks of plan, model, batch and optimizers before anything is allocated."""
