"""Sharding propagation: choose a legal row for each op, and predict states and communication offline."""
