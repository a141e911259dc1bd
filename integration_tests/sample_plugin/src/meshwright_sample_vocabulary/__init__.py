"""A third-party strategy for meshwright: embeddings and output heads are shared along a mesh axis of their own."""
