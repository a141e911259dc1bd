"""Damaged and hostile files of every format that is read from outside: `python -m integration_tests.fuzzing`."""
