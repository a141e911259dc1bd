"""Where inputs and parameters are placed, which models are parallel, and how that is undone."""
