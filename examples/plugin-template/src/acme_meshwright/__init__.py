"""One small plugin of each kind for meshwright."""
