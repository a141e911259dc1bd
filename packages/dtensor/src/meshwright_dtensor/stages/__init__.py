"""Parameters of all pipeline stages on every rank, outside of a step: the values of one device."""
