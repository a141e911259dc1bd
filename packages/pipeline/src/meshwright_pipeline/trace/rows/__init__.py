"""Which rows of the batch a value was computed from."""
