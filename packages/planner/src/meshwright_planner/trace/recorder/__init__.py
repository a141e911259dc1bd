"""Runs a model once on fake tensors and records the operations: `record` is the entry."""
