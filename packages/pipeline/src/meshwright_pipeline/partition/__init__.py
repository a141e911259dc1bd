"""Units of a model, units that repeat, and boundaries of stages."""
