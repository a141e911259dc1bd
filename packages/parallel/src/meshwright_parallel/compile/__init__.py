"""Compiled regions: modules whose local programs run as compiled graphs."""
