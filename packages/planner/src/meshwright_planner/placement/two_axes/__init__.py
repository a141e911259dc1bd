"""Placements on two searched axes at once.

A value has one state per axis, outermost first; what that needs and costs is in the modules here.  Where a placement on one
axis has a State, one on two has a tuple of them.
"""
