"""What there is to save, by key: model, optimizer, random streams."""
