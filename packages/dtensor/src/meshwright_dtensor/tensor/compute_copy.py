"""Compute copies: the value that computations take of a mesh parameter, if it is not the stored value.

A parameter may be stored in shards (ZeRO) or in another precision (fp32 master weights) than it is computed with. Its
compute copy (the unsharded parameter of FSDP2) is a plain leaf tensor with its own layout; an engine fills it and takes its
gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from meshwright_dtensor.errors import UnsupportedError

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.layout import Layout

_IS_COPY = "_meshwright_is_copy"
_STEP: ContextVar[object | None] = ContextVar("_STEP", default=None)


class ComputeCopy(ABC):
    """The compute copy of one mesh parameter.

    Attributes:
        layout: of the copy, with its dtype.
        touched: number of writes to the parameter that torch's version counters do not count.
    """

    __slots__ = ("layout", "touched")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.touched = 0

    @property
    @abstractmethod
    def computing(self) -> bool:
        """Whether a forward is running, in which `parameter.dtype` is that of the copy."""

    @property
    def of_engine(self) -> ComputeCopy | None:
        """The copy that an engine fills: this one, or the one that this one stands for during a pipeline's step."""
        return self

    @abstractmethod
    def take(self) -> torch.Tensor:
        """The copy, up to date and recorded by autograd; a collective call where it has to be gathered."""

    @abstractmethod
    def leaf(self) -> torch.Tensor:
        """The leaf at which autograd accumulates the gradient."""

    @abstractmethod
    def stored_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of a complete gradient of the copy, in the stored layout and dtype."""

    @abstractmethod
    def follow(self, requires_grad: bool) -> None:
        """Take over the parameter's `requires_grad`."""


@contextmanager
def forwards_of_one_step() -> Iterator[None]:
    """Inside, forwards of a model are those of microbatches of one call: only the model itself may write to parameters in between.

    So an engine makes its copies once, and anew only where torch has counted a write.
    """
    token = _STEP.set(object())
    try:
        yield
    finally:
        _STEP.reset(token)


def step_of_forwards() -> object | None:
    """What identifies the step that the current forward is a part of; None outside of `forwards_of_one_step`."""
    return _STEP.get()


def mark_as_copy(leaf: torch.Tensor) -> None:
    """Mark `leaf` as a compute copy: a write to a view of it is no write to the parameter."""
    leaf.__dict__[_IS_COPY] = True


def is_of_copy(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a marked compute copy or a view of one."""
    return _IS_COPY in (tensor if tensor._base is None else tensor._base).__dict__


def refuse_write_to_copy(written: torch.Tensor) -> None:
    """Refuse a write to a view of a compute copy, which is gathered again before its next use.

    Raises UnsupportedError: the tensor is such a view.
    """
    if is_of_copy(written):
        raise UnsupportedError(
            f"a write to a view, of shape {list(written.shape)}, of a parameter that is sharded by zero or computed in another "
            "precision: the view was taken for autograd and is one of the compute copy, so the write would not reach the "
            "parameter; take the view under torch.no_grad(), or write to parameter.data"
        )


def touch(values: object) -> None:
    """Count a write to every parameter among the arguments of a function, lists included."""
    if isinstance(values, (tuple, list)):
        for value in values:
            touch(value)
        return
    copy = getattr(values, "_copy", None)
    if isinstance(copy, ComputeCopy):
        copy.touched += 1


def computing(values: object) -> bool:
    """Whether a parameter among the arguments has a compute copy while a forward runs, which takes the copy."""
    if isinstance(values, (tuple, list)):
        return any(map(computing, values))
    copy = getattr(values, "_copy", None)
    return isinstance(copy, ComputeCopy) and copy.computing
