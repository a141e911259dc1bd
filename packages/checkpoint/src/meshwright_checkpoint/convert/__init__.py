"""Export, reshard on disk, verify and compare checkpoints."""
