"""Views of stored DTensors: their base, the functions that took them, and their present value.

A view shares memory with its base where stock DTensor's view does, or where every rank holds the whole value.  Elsewhere
it is a copy, which is taken again at each read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from meshwright_dtensor._torch import core
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of, uneven_dims
from meshwright_dtensor.stored.gather import gather_stored, stored_layout, whole_value
from meshwright_dtensor.stored.permuted import is_permuted, stock_dtensor
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.trace.function_kinds import Args, Function
from meshwright_dtensor.utils.host import HOST

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One function that takes a view: its arguments after the first, and which of its results it is (None: the only one)."""

    func: Function
    args: Args
    kwargs: Mapping[str, Any]
    index: int | None = None

    @property
    def by_strides(self) -> bool:
        """Whether it counts places from the start of the memory."""
        return getattr(self.func, "__name__", "") == "as_strided"

    def __call__(self, x: Any, start: int = 0) -> Any:
        """The view of ``x``, or of a view of a base that begins at ``start`` in its memory."""
        if self.by_strides and start:
            given = dict(zip(("size", "stride", "storage_offset"), self.args, strict=False)) | dict(
                self.kwargs
            )
            if given.get("storage_offset") is not None:
                given["storage_offset"] += start
            return self.func(x, **given)
        result = self.func(x, *self.args, **self.kwargs)
        return result if self.index is None else result[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The base of a view and the steps that take it. `sketch`: the view on one device, as a meta tensor."""

    base: DTensor
    sketch: Tensor
    steps: tuple[Step, ...] = ()

    @staticmethod
    def of(base: DTensor) -> Origin:
        """The base itself."""
        layout, local = stored_layout(base), core.dtensor_local(base)
        strides = dense_strides(layout.shape, dim_order_of(local))
        return Origin(base, torch.empty_strided(layout.shape, strides, dtype=local.dtype, device="meta"))

    def __call__(self, x: Any) -> Any:
        """The view of ``x``, which has the geometry of the base."""
        start = int(x.storage_offset()) if type(x) is Tensor else 0
        for step in self.steps:
            x = step(x, start)
        return x

    def then(self, func: Function, args: Args, kwargs: Mapping[str, Any]) -> list[Origin] | Origin | None:
        """The origins of the views that ``func`` takes of this view; None where it copies on one device.

        Raises the errors of one device.
        """
        if getattr(func, "__name__", "") == "__getitem__" and not _is_basic(args[0]):
            return None
        args, kwargs = frozen_arguments((args, dict(kwargs)))
        made = func(self.sketch, *args, **kwargs)
        if not isinstance(made, Tensor):
            return [
                Origin(self.base, sketch, (*self.steps, Step(func, args, kwargs, i)))
                for i, sketch in enumerate(made)
            ]
        if not core.share_memory(made, self.sketch):
            return None
        return Origin(self.base, made, (*self.steps, Step(func, args, kwargs)))

    def value(self) -> tuple[DTensor, bool]:
        """The present value as a stock DTensor, and whether it shares memory with the base.

        A collective call where it does not.
        """
        base = self.base
        layout, local = stored_layout(base), core.dtensor_local(base).detach()
        with torch.no_grad():
            stock = None if is_permuted(layout.states) else self._by_stock(core.dtensor_like(local, base))
            if stock is not None:
                return stock, core.share_memory(core.dtensor_local(stock), local)
            whole = gather_stored(base)
            part = self(whole)
            replicated = layout.with_states(layout.context.replicated)
            return stock_dtensor(part, replicated, part.shape, part.stride()), core.share_memory(whole, local)

    def _by_stock(self, x: DTensor) -> DTensor | None:
        """The view of ``x`` by stock DTensor; None where it has no rule.

        Only with even shards: all ranks then fail together, and none waits in a collective call.
        """
        try:
            with core.stock_call():
                for step in self.steps:
                    if step.by_strides or not _is_even(x):
                        return None
                    x = step(x)
                    if type(x) is not DTensor or not all(
                        p.is_replicate() or type(p) is Shard for p in x.placements
                    ):
                        return None
        except (RuntimeError, NotImplementedError):
            return None
        return (
            core.dtensor_like(core.waited(core.dtensor_local(x)), x) if x.shape == self.sketch.shape else None
        )


def _is_even(x: DTensor) -> bool:
    layout = stored_layout(x)
    return not uneven_dims(layout.shape, layout.context.sizes, layout.states)


def _is_basic(index: Any) -> bool:
    """Whether an index has only numbers, slices, None and Ellipsis: indexing then gives a view."""
    return all(
        x is None or x is Ellipsis or isinstance(x, slice) or _is_number(x)
        for x in (index if isinstance(index, tuple) else (index,))
    )


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):
        return type(x) is Tensor and x.dim() == 0 and x.dtype not in (torch.bool, torch.uint8)
    return hasattr(x, "__index__") and not isinstance(x, bool) and getattr(x, "ndim", 0) == 0


def frozen_arguments(tree: Any) -> Any:
    """Copies of the arguments that take a view: a tensor used as an index may change later."""
    return core.pytree.tree_map(_frozen, tree)


def _frozen(x: Any) -> Any:
    # of another tensor only the shape is read (``view_as``)
    if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32):
        return whole_value(x).clone()
    if isinstance(x, (DTensor, GlobalTensor)):
        return torch.empty((), dtype=x.dtype, device=HOST).expand(x.shape)
    if isinstance(x, slice):
        return slice(*[b.clone() if type(b) is Tensor else b for b in (x.start, x.stop, x.step)])
    return x.clone() if isinstance(x, Tensor) else x
