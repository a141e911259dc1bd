"""Small helpers: names, byte sizes, fingerprints, this process."""
