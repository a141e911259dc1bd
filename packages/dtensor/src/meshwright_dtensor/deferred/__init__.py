"""Deferred initialisation: build a model without memory, then materialise only this rank's shards."""
