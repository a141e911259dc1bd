"""One eager run of a model, watched: its tape, what repeats in it, and the same tape for other batches."""
