"""Turn a model into the stages of this rank."""
