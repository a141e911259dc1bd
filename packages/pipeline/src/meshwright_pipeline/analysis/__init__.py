"""May the batch be cut into microbatches? Loss additivity and row mixing."""
