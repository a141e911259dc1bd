"""Torch's own database of operators on tensors of a mesh, compared with one device."""
