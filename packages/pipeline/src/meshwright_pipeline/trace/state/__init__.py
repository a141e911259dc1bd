"""State that a forward writes: attributes, buffers, other tensors."""
