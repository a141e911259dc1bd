"""A user's ``autograd.Function`` that works element by element (an activation) runs on the shards as it is.

Whether it does is tried on fake tensors of the global and of the local shape: forward and backward must record the same
pointwise operations with the same numbers.  Any other Function is given whole values (fallback).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from meshwright_dtensor._torch.core import fake_mode, quiet_fakes, without_modes
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.trace.graph import Recorder

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.layout import Layout

Tensor = torch.Tensor
_PLAIN = (int, float, bool, str, type(None), torch.dtype)
_MAKES_ALIKE = frozenset({"aten.ones_like", "aten.zeros_like", "aten.full_like", "aten.empty_like"})


def runs_on_shards(cls: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether ``cls.apply(*args)`` may be called with the local tensors of its arguments."""
    tensors = [a for a in args if type(a) is GlobalTensor]
    if kwargs or not tensors or len(tensors) != sum(isinstance(a, Tensor) for a in args):
        return False
    layout: Layout = tensors[0]._layout
    if layout.replicated or "P" in layout.states or any(t._layout is not layout for t in tensors):
        return False
    if not all(isinstance(a, (Tensor, *_PLAIN)) for a in args):
        return False
    key = (cls, layout, tuple(type(a) if isinstance(a, Tensor) else (type(a), a) for a in args))
    known = layout.context.functions
    if key not in known:
        known[key] = _is_elementwise(cls, args, layout)
    return known[key]


def _is_elementwise(cls: Any, args: Sequence[Any], layout: Layout) -> bool:
    if layout.shape == layout.local_shape or 0 in layout.local_shape:
        return False
    whole, local = (_recorded(cls, args, shape, layout.dtype) for shape in (layout.shape, layout.local_shape))
    return whole is not None and whole == local


def _recorded(
    cls: Any, args: Sequence[Any], shape: torch.Size, dtype: torch.dtype
) -> list[tuple[str, str]] | None:
    """The operations of forward and backward with their arguments, None if one is not pointwise."""
    mode = fake_mode()
    try:
        with without_modes(), quiet_fakes(), torch.enable_grad(), mode:
            fakes = [
                torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)
                for a in args
                if isinstance(a, Tensor)
            ]
            given = iter(fakes)
            recorder = Recorder({}, fakes)
            with recorder:
                out = cls.apply(*[next(given) if isinstance(a, Tensor) else a for a in args])
                if not isinstance(out, Tensor) or out.shape != shape:
                    return None
                if out.requires_grad:
                    torch.autograd.grad(out, fakes, torch.empty_like(out), allow_unused=True)
    except (
        Exception
    ):  # whatever a user's code raises on fakes: it is then given whole values, where it may well run
        return None
    found = []
    for node in recorder.nodes:
        shapes = {recorder.values[r.i].shape for r in (*node.ins, *node.outs)}
        alike = ".".join(node.name.split(".")[:2]) in _MAKES_ALIKE
        if (
            node.op is None
            or not (alike or torch.Tag.pointwise in node.op.tags)
            or shapes - {tuple(shape), ()}
        ):
            return None
        if torch.Tag.nondeterministic_seeded in node.op.tags:
            return None
        found.append((node.name, repr((node.args, node.kwargs))))
    return found
