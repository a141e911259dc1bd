"""shard_loader() and the guard of its random numbers."""
