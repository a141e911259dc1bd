"""Collectives and redistribution of tensors from layout to layout, and a log of what ran."""
