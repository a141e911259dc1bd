"""Placements on one mesh axis: what is legal, and the best of it by integer programming."""
