"""Global tensors and compute copies of parameters."""
