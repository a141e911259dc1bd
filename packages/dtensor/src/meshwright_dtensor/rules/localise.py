"""The op and arguments to run on local tensors: size arguments speak of the local shape, nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from meshwright_dtensor.rules.lift import slice_bounds
from meshwright_dtensor.rules.node import NodeView, Slot, base_name, dims_of, numel
from meshwright_dtensor.sharding.boxes import Region
from meshwright_dtensor.sharding.reshape import local_slice
from meshwright_dtensor.trace.graph import Ref

aten = torch.ops.aten
Shapes = Sequence[tuple[int, ...]]
LocalOp = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_RESHAPED = frozenset("aten." + n for n in ["view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"])
_SIZED_FIRST = frozenset("aten." + n for n in ["zeros", "ones", "full", "empty"])
_SIZED_SECOND = frozenset(
    "aten." + n for n in ["expand", "expand_copy", "new_zeros", "new_ones", "new_full", "new_empty"]
)

_SLICES = frozenset({"aten.slice", "aten.slice_copy"})
_SPLITS = frozenset(
    "aten." + n
    for n in "split split_with_sizes split_copy split_with_sizes_copy unsafe_split unsafe_split_with_sizes".split()
)


def mean_of_shards(
    x: torch.Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, *, count: int
) -> torch.Tensor:
    """This rank's part of a mean over ``count`` elements of which it may hold only some; a sum could overflow float16."""
    held = numel([x.shape[d] for d in dim])
    if held == 0:  # a rank that holds nothing of it: the mean of nothing is nan
        return x.sum(dim, keepdim, dtype=dtype)
    return x.mean(dim, keepdim, dtype=dtype) * (held / count)


def localise(
    view: NodeView, out_shapes: Shapes, in_shapes: Shapes | None = None, held: Region | None = None
) -> LocalOp:
    """What to run on locals so that it yields the locals of ``node.outs``.

    Args:
        view: the node with GLOBAL shapes.
        out_shapes: local shapes of ``node.outs``.
        in_shapes: local shapes of ``node.ins``; without them ops that need to know (mean) take their general form.
        held: what the rank holds of the first input, per dim its intervals, for slices of a dim that is sharded.

    Returns:
        (callable, args, kwargs); refs stay in place of tensors.
    """
    node = view.node
    op, args, kwargs = node.op, list(node.args), dict(node.kwargs)
    name = base_name(node.name)
    if node.name == "aten.view.dtype":
        pass
    elif name in _RESHAPED:
        return aten.reshape.default, (args[0], list(out_shapes[0])), {}
    elif name == "aten.squeeze":
        if _vanishing(view, out_shapes):
            return aten.reshape.default, (args[0], list(out_shapes[0])), {}
    elif name in _SIZED_FIRST:
        args[0] = list(out_shapes[0])
    elif name in _SIZED_SECOND:
        args[1] = list(out_shapes[0])
    elif name == "aten.native_group_norm":
        shape = out_shapes[0]
        args[3:6] = [shape[0], shape[1], numel(shape[2:])]
    elif name == "aten.convolution":
        args[8] = max(1, args[8] * out_shapes[0][1] // view.out_shapes[0][1]) if args[8] > 1 else args[8]
    elif name in _SLICES:
        bounds = slice_bounds(view)
        if (
            bounds is not None
            and held is not None
            and held[bounds[0]] != ((0, view.in_shapes[0][bounds[0]]),)
        ):
            dim, first, last = bounds
            part = local_slice(held[dim], first, last)
            assert part is not None  # what the rows allow
            return op, (args[0], dim, part[1], part[1] + part[2]), {}
    elif name in _SPLITS:
        dim = view.bound()["dim"] % len(view.in_shapes[0])
        sizes = [shape[dim] for shape in out_shapes]
        if sizes != [shape[dim] for shape in view.out_shapes]:
            if isinstance(args[1], int) and len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]:
                return op, (args[0], sizes[0], dim), {}
            return aten.split_with_sizes.default, (args[0], sizes, dim), {}
    elif name == "aten.mean":
        return _mean(view, in_shapes)
    return op, tuple(args), kwargs


def _vanishing(view: NodeView, out_shapes: Shapes) -> bool:
    """Whether a dim that is kept has local size 1, which a literal squeeze would remove."""
    return any(local == 1 != whole for local, whole in zip(out_shapes[0], view.out_shapes[0], strict=True))


def _mean(view: NodeView, in_shapes: Shapes | None) -> LocalOp:
    node, whole = view.node, view.in_shapes[0]
    bound = view.bound()
    dims = [d for d in dims_of(bound.get("dim"), len(whole)) if d < len(whole)]
    if not whole or (in_shapes is not None and all(in_shapes[0][d] == whole[d] for d in dims)):
        return node.op, node.args, node.kwargs
    count = numel([whole[d] for d in dims])
    assert isinstance(bound["self"], Slot)
    source: Ref = node.ins[0]
    arguments = (source, dims, bool(bound.get("keepdim")), bound.get("dtype"))
    return partial(mean_of_shards, count=count), arguments, {}
