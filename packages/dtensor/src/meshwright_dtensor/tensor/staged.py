"""Marks tensor classes whose own rules run every function: values of pipeline stages, placeholders, replaced tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.unheard import Unheard


class Staged(Unheard):
    """Base of these tensor classes; global tensors and parameters leave every call with one of them to it."""


class StagedOperand(Exception):
    """A call on global tensors has an operand whose own rules run it."""


def check_copied(parameters: Iterable[object]) -> None:
    """Raise UnsupportedError where a module is copied whose parameters are those of pipeline stages."""
    if any(isinstance(parameter, Staged) for parameter in parameters):
        refuse_copied_stages()


def refuse_copied_stages() -> NoReturn:
    """Raise UnsupportedError: a pipelined model is copied."""
    raise UnsupportedError(
        "a pipelined model cannot be copied: each rank holds only its stages; build another model and parallelize that"
    )
