"""A third-party strategy for meshwright: the sequence of the batch is shared along a mesh axis of its own."""
