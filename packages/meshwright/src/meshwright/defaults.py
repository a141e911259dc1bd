"""Sizes that commands take where nobody says them.  Torch-free."""

ROWS, TOKENS = 8, 128
"""Rows and tokens of a batch of which nobody says how large it is."""
