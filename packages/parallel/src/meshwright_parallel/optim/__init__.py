"""Gradient clipping, gradient scaling, and optimizer steps on sharded parameters."""
