"""Copies of a run's state in the memory of its hosts, each on two of them."""
