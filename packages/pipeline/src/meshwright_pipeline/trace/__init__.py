"""Profiled runs of a meta copy of the model: profile, row provenance, random numbers, loss."""
