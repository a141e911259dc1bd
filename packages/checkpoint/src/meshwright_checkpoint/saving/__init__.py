"""Save: staging in host memory, background writes, commit."""
