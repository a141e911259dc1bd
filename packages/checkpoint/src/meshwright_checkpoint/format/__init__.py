"""The manifest, safetensors files, checksums and JSON values of a checkpoint."""
