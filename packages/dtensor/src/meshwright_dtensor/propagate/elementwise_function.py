"""Decides whether a user's ``autograd.Function`` (an activation) is elementwise, and so runs on the local tensors as it is.

It is tried on fake tensors of the global and of the local shape: forward and backward must record the same pointwise
operations with the same numbers.  Any other Function is given whole values (see fallback).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright_dtensor._torch.core import quiet_fakes
from meshwright_dtensor._torch.modes import fake_mode, without_modes
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.trace.graph import Recorder
from meshwright_dtensor.utils.host import HOST

Tensor = torch.Tensor
_PLAIN = (int, float, bool, str, type(None), torch.dtype)
_FACTORIES = frozenset({"aten.ones_like", "aten.zeros_like", "aten.full_like", "aten.empty_like"})


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
    arguments = tuple(None if isinstance(a, Tensor) else (type(a), a) for a in args)
    return layout.context.cached(_is_elementwise, cls, layout, arguments)


_Arguments = tuple[tuple[type, Any] | None, ...]
"""The arguments of a Function: None for a tensor, else (type, value)."""


def _is_elementwise(_context: MeshContext, cls: Any, layout: Layout, arguments: _Arguments) -> bool:
    if layout.shape == layout.local_shape or 0 in layout.local_shape:
        return False
    whole = _recorded(cls, arguments, layout.shape, layout.dtype)
    return whole is not None and whole == _recorded(cls, arguments, layout.local_shape, layout.dtype)


def _recorded(
    cls: Any, arguments: _Arguments, shape: torch.Size, dtype: torch.dtype
) -> list[tuple[str, str]] | None:
    """The operations of forward and backward with their arguments, None if one is not pointwise."""
    mode = fake_mode()
    try:
        with without_modes(), quiet_fakes(), torch.enable_grad(), mode:
            fakes = [
                torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point, device=HOST)
                for argument in arguments
                if argument is None
            ]
            inputs = iter(fakes)
            recorder = Recorder({}, fakes)
            with recorder:
                out = cls.apply(*[next(inputs) if a is None else a[1] for a in arguments])
                if not isinstance(out, Tensor) or out.shape != shape:
                    return None
                if out.requires_grad:
                    torch.autograd.grad(out, fakes, torch.empty_like(out), allow_unused=True)
    # the user's code may raise anything on fakes; on whole values it may still run
    except Exception:
        return None
    operations = []
    for node in recorder.nodes:
        shapes = {recorder.values[r.i].shape for r in (*node.ins, *node.outs)}
        factory = ".".join(node.name.split(".")[:2]) in _FACTORIES
        if (
            node.op is None
            or not (factory or torch.Tag.pointwise in node.op.tags)
            or shapes - {tuple(shape), ()}
            or torch.Tag.nondeterministic_seeded in node.op.tags
        ):
            return None
        operations.append((node.name, repr((node.args, node.kwargs))))
    return operations
