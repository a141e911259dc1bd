"""DTensors outside autograd: gathering, views, in-place writes, elementwise calls."""
