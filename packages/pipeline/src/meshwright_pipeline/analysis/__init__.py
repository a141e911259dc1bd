"""Decides whether the batch can be split into microbatches: loss additivity and row mixing."""
