"""What work, communication and memory cost on a cluster."""
