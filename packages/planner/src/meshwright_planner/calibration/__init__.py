"""Measures this machine: operations on one rank, contention and collectives of several."""
