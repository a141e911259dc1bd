"""Memory of a rank: saved tensors, liveness, and the peak over a step."""
