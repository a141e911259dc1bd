"""Planning of a pipeline: survey, search space, stage cuts, simulated steps, recomputation."""
