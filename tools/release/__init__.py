"""The parts of `tools/check_release.py`."""
