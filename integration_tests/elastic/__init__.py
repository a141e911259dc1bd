"""Whole elastic runs, killed from outside: `python -m integration_tests.elastic`."""
