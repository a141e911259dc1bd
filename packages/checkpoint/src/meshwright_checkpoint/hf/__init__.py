"""Read from_pretrained directories."""
