"""Placements on two searched axes at once: states are tuples with one State per axis, outermost first."""
