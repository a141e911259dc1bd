"""Direct reads and writes, host memory, and the background thread."""
