"""Compute copies: what a mesh parameter is computed with, where that is not its stored part.

A parameter may be stored in shards (ZeRO) or in another precision (fp32 master weights) than it is computed with. Its
compute copy is a plain leaf tensor with a layout of its own; an engine fills it, and takes the gradients that arrive at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from meshwright_dtensor.errors import UnsupportedError

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.layout import Layout

_IS_COPY = "_meshwright_is_copy"


class ComputeCopy(ABC):
    """The compute copy of one mesh parameter.

    Attributes:
        layout: how the copy lies over the mesh, and its dtype.
        touched: how often the parameter was written to by functions that torch's version counters do not see.
    """

    __slots__ = ("layout", "touched")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.touched = 0

    @property
    @abstractmethod
    def computing(self) -> bool:
        """Whether a forward is running, in which `parameter.dtype` is that of the copy."""

    @abstractmethod
    def take(self) -> torch.Tensor:
        """The copy, up to date and connected to autograd; a collective call where it has to be gathered."""

    @abstractmethod
    def leaf(self) -> torch.Tensor:
        """The tensor at which autograd accumulates, as it is."""

    @abstractmethod
    def stored_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part, in the stored layout and dtype, of a complete gradient of the copy."""

    @abstractmethod
    def follow(self, requires_grad: bool) -> None:
        """Take over the parameter's `requires_grad`."""


def mark_as_copy(leaf: torch.Tensor) -> None:
    """Note that `leaf` is the compute copy of a parameter: writes to views of it must not pass for writes to that."""
    leaf.__dict__[_IS_COPY] = True


def is_of_copy(tensor: torch.Tensor) -> bool:
    """Whether the tensor is marked as a compute copy, or a view of one that is."""
    return _IS_COPY in (tensor if tensor._base is None else tensor._base).__dict__


def refuse_write_to_copy(written: torch.Tensor) -> None:
    """Raise if what is about to be written to is a view of a compute copy, which is gathered anew before it is used again.

    Raises:
        UnsupportedError: it is.
    """
    if is_of_copy(written):
        raise UnsupportedError(
            f"a write to a view, of shape {list(written.shape)}, of a parameter that is sharded by zero or computed in another "
            "precision: the view was taken for autograd and shows what is computed with, so the write would not reach the "
            "parameter; take the view under torch.no_grad(), or write to parameter.data"
        )


def touch(values: object) -> None:
    """Note a write to every parameter among the arguments of a function (lists are looked into)."""
    if isinstance(values, (tuple, list)):
        for value in values:
            touch(value)
        return
    copy = getattr(values, "_copy", None)
    if isinstance(copy, ComputeCopy):
        copy.touched += 1


def computing(values: object) -> bool:
    """Whether a parameter among the arguments has a compute copy and a forward runs, which takes the copy, dtype and all."""
    if isinstance(values, (tuple, list)):
        return any(map(computing, values))
    copy = getattr(values, "_copy", None)
    return isinstance(copy, ComputeCopy) and copy.computing
