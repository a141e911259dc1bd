"""Recomputation: which modules it means, and what it changes."""
