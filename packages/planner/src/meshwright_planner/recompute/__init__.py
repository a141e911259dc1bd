"""Recompute: the rules of a request, the nodes that run again, and the effect on time and memory."""
