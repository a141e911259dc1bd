"""The backend of torch.distributed.checkpoint."""
