"""shard_loader(), and the guard against random numbers in datasets."""
