"""Marks tensors that only the ranks of some pipeline stages hold, for the other tensor classes (see ``stages``)."""

from __future__ import annotations


class Staged:
    """Base of the tensor classes that only some stages hold: their own rules run every function of them."""


class StagedOperand(Exception):
    """A call on global tensors has an operand that only some stages hold."""
