"""Facts about an nn.Module: tied parameters, repeated blocks, stages, batch size, precision."""
