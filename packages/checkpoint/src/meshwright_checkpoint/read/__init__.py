"""Read any box of a tensor; ranks of one node share reads."""
