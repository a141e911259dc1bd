"""verify(): compare a parallel run with one device."""
