"""Marks tensor classes whose own rules run every function: values of pipeline stages, placeholders, replaced tensors."""

from __future__ import annotations

from meshwright_dtensor.tensor.unheard import Unheard


class Staged(Unheard):
    """Base of these tensor classes; global tensors and parameters leave every call with one of them to it."""


class StagedOperand(Exception):
    """A call on global tensors has an operand whose own rules run it."""
