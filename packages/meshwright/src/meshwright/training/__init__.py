"""`meshwright train`: a trainer of recipes. Read `loop.py` first: it is the example of how to use the library."""
