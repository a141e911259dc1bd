"""Placement of batches, registry of parallel models, the plan of a pipeline stage, and undoing a plan."""
