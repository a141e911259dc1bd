"""Point-to-point messages of a pipeline: the groups they travel in, the messages, those of one step."""
