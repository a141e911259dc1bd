"""Small helpers: names, byte sizes, CPU count, fingerprints, shutdown."""
