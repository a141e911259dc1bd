"""from_pretrained directories as sources."""
