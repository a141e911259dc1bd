"""The border sweep: what torch lets a user do with a model, done with a parallel one and with that of one device.

`python -m integration_tests.border` writes docs/border.md.
"""
