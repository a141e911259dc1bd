"""Shards of this rank, which rank writes what, and coverage of whole tensors."""
