"""The first-party composites, one module each."""
