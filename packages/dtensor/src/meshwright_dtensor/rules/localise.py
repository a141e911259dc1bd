"""The op and arguments to run on local tensors: size arguments become those of the local shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshwright_dtensor.rules.lift import slice_bounds
from meshwright_dtensor.rules.node import RESHAPES, SLICES, SPLITS, NodeView, aten_ops, base_name, dims_of
from meshwright_dtensor.sharding.boxes import Region
from meshwright_dtensor.sharding.reshape import local_slice

aten = torch.ops.aten
Shapes = Sequence[tuple[int, ...]]
LocalOp = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def mean_of_shards(
    x: torch.Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, *, count: int
) -> torch.Tensor:
    """This rank's part of a mean over ``count`` elements, of which it may hold some only; a sum could overflow float16."""
    held = math.prod([x.shape[d] for d in dim])
    # the mean of no elements is nan
    if held == 0:
        return x.sum(dim, keepdim, dtype=dtype)
    return x.mean(dim, keepdim, dtype=dtype) * (held / count)


def loss_of_shards(op: Callable[..., Any], count: int, *args: Any, **options: Any) -> Any:
    """This rank's part of a mean loss over ``count`` elements, and what the op gives after it."""
    held = args[0].numel()
    result = op(*args, **options)
    loss, *others = result if isinstance(result, tuple) else (result,)
    # the mean of no elements is nan
    return [loss * (held / count) if held else args[0].sum(), *others]


def localise(
    view: NodeView, out_shapes: Shapes, in_shapes: Shapes | None = None, held: Region | None = None
) -> LocalOp:
    """The call on local inputs that yields the local tensors of ``node.outs``.

    Args:
        view: the node with GLOBAL shapes.
        out_shapes: local shapes of ``node.outs``.
        in_shapes: local shapes of ``node.ins``; without them ops that need them (mean) take their general form.
        held: intervals that the rank holds of the first input, per dim; for slices of a sharded dim.

    Returns:
        (callable, args, kwargs); refs stay in place of tensors.
    """
    node = view.node
    name = base_name(node.name)
    if name == "aten.mean":
        return _mean(view, in_shapes)
    if "_loss" in name or name.startswith("aten.binary_cross_entropy"):
        return _loss(view, in_shapes)
    localiser = None if node.name == "aten.view.dtype" else _LOCALISERS.get(name)
    local_op = None if localiser is None else localiser(view, out_shapes, held)
    return (node.op, node.args, dict(node.kwargs)) if local_op is None else local_op


def _replaced(view: NodeView, start: int, *values: Any) -> LocalOp:
    """The node's call with the arguments from position ``start`` on replaced by ``values``."""
    args = list(view.node.args)
    args[start : start + len(values)] = values
    return view.node.op, tuple(args), dict(view.node.kwargs)


def _reshape(view: NodeView, out_shapes: Shapes, held: Region | None) -> LocalOp:
    return aten.reshape.default, (view.node.args[0], list(out_shapes[0])), {}


def _squeeze(view: NodeView, out_shapes: Shapes, held: Region | None) -> LocalOp | None:
    """As reshape if a kept dim has local size 1, which a literal squeeze would remove."""
    whole = view.out_shapes[0]
    if any(local == 1 != size for local, size in zip(out_shapes[0], whole, strict=True)):
        return _reshape(view, out_shapes, held)
    return None


def _sized(position: int, view: NodeView, out_shapes: Shapes, held: Region | None) -> LocalOp:
    return _replaced(view, position, list(out_shapes[0]))


def _group_norm(view: NodeView, out_shapes: Shapes, held: Region | None) -> LocalOp:
    shape = out_shapes[0]
    return _replaced(view, 3, shape[0], shape[1], math.prod(shape[2:]))


def _convolution(view: NodeView, out_shapes: Shapes, held: Region | None) -> LocalOp | None:
    groups = view.node.args[8]
    if groups <= 1:
        return None
    return _replaced(view, 8, max(1, groups * out_shapes[0][1] // view.out_shapes[0][1]))


def _slice(view: NodeView, out_shapes: Shapes, held: Region | None) -> LocalOp | None:
    bounds = slice_bounds(view)
    if bounds is None or held is None:
        return None
    dim, first, last = bounds
    if held[dim] == ((0, view.in_shapes[0][dim]),):
        return None
    part = local_slice(held[dim], first, last)
    # the rows allow no other
    assert part is not None
    return view.node.op, (view.node.args[0], dim, part[1], part[1] + part[2]), {}


def _split(view: NodeView, out_shapes: Shapes, held: Region | None) -> LocalOp | None:
    node = view.node
    dim = view.bound()["dim"] % len(view.in_shapes[0])
    sizes = [shape[dim] for shape in out_shapes]
    if sizes == [shape[dim] for shape in view.out_shapes]:
        return None
    if isinstance(node.args[1], int) and len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]:
        return node.op, (node.args[0], sizes[0], dim), {}
    return aten.split_with_sizes.default, (node.args[0], sizes, dim), {}


def _mean(view: NodeView, in_shapes: Shapes | None) -> LocalOp:
    node, whole = view.node, view.in_shapes[0]
    bound = view.bound()
    dims = [d for d in dims_of(bound.get("dim"), len(whole)) if d < len(whole)]
    if not whole or (in_shapes is not None and all(in_shapes[0][d] == whole[d] for d in dims)):
        return node.op, node.args, node.kwargs
    count = math.prod([whole[d] for d in dims])
    arguments = (node.ins[0], dims, bool(bound.get("keepdim")), bound.get("dtype"))
    return partial(mean_of_shards, count=count), arguments, {}


def _loss(view: NodeView, in_shapes: Shapes | None) -> LocalOp:
    node, whole = view.node, view.in_shapes[0]
    # 1 is a mean
    if view.bound()["reduction"] != 1 or (in_shapes is not None and in_shapes[0] == whole):
        return node.op, node.args, node.kwargs
    return partial(loss_of_shards, node.op, math.prod(whole)), node.args, node.kwargs


_LOCALISERS: Mapping[str, Callable[[NodeView, Shapes, Region | None], LocalOp | None]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(SLICES, _slice),
    **dict.fromkeys(SPLITS, _split),
    **dict.fromkeys(aten_ops("zeros ones full empty"), partial(_sized, 0)),
    **dict.fromkeys(aten_ops("new_zeros new_ones new_full new_empty expand expand_copy"), partial(_sized, 1)),
    "aten.squeeze": _squeeze,
    "aten.squeeze_copy": _squeeze,
    "aten.native_group_norm": _group_norm,
    "aten.convolution": _convolution,
}
"""op name -> (view, local shapes of the outputs, held region of the first input) -> call, None for the node's own."""
