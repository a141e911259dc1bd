"""What the planner is told of pipelines: survey, stage cuts, simulated steps, recomputation."""
