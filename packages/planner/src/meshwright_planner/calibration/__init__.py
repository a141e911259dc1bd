"""Measuring the machine at hand: operations on one rank, and what several ranks do to each other."""
