"""Storage backends, open checkpoints, retention."""
