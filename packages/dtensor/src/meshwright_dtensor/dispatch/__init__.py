"""From a torch call on global tensors to the local program of this rank: key, cache, derivation, fallback."""
