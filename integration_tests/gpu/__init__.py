"""Checks on one GPU, for whoever has one: `tox -e gpu`. Without a GPU all but those of its kernels run on the CPU."""
