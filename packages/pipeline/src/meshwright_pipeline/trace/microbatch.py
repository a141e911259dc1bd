"""Splits a batch into microbatches."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.utils.names import count_of
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.pytrees import tensors_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


def rows_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Number of rows of a batch: dim 0 of its first tensor with dims."""
    return BatchSize.of((t.shape, t.is_floating_point()) for t in tensors_of((tuple(args), kwargs))).rows


def padded(call: Call, count: int) -> Call:
    """A call whose rows `count` microbatches share equally: `call` itself, or with copies of its last row appended."""
    rows = rows_of(*call)
    missing = 0 if rows is None else -rows % count
    if not missing:
        return call

    def longer(leaf: torch.Tensor) -> torch.Tensor:
        return torch.cat([leaf, *[leaf[-1:]] * missing]) if leaf.dim() and leaf.shape[0] == rows else leaf

    changed: Call = pytree.tree_map_only(torch.Tensor, longer, call)
    return changed


def microbatches(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[Call]:
    """The arguments of `count` calls with equally many rows each. Leaves without batch rows are passed unchanged.

    Raises:
        UsageError: the rows cannot be divided equally.
        UnsupportedError: an object that cannot be split contains rows.
    """
    if count == 1:
        return [(args, kwargs)]
    rows = rows_of(args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for leaf in pytree.tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, PackedSequence)):
        _check_splittable(leaf, rows, count)
    if rows is None or rows % count:
        what = "a batch without rows" if rows is None else f"a batch of {count_of(rows, 'row')}"
        fix = "pad the batch, drop its rest, or change pipeline.microbatches"
        raise UsageError(f"{what} cannot be split into {count} equal microbatches; {fix}")
    step = rows // count

    def part(leaf: Any, index: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        rows_of_part = leaf[index * step : (index + 1) * step]
        # .data: a write to one of them (labels of which -100 are replaced, say) is none to what others have saved
        return rows_of_part if leaf.requires_grad else rows_of_part.data

    return [pytree.tree_unflatten([part(leaf, i) for leaf in leaves], spec) for i in range(count)]


def _check_splittable(leaf: Any, rows: int | None, count: int) -> None:
    """Check that no object contains rows: every microbatch would get all of them."""
    fix = "pass its tensors in a dict or a tuple"
    # pytree flattens it, but its dim 0 is not the row dim
    if isinstance(leaf, PackedSequence):
        fix, hidden = "pad it (pad_packed_sequence) and pack it in forward", True
    else:
        held = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
        inside = [x for x in held.values() if isinstance(x, torch.Tensor)]
        hidden = not isinstance(leaf, torch.Tensor) and any(x.dim() and x.shape[0] == rows for x in inside)
    if hidden:
        raise UnsupportedError(
            f"the batch contains a {type(leaf).__name__}. A pipeline cannot split its rows into {count} microbatches: it splits "
            f"dim 0 of tensors, also in tuples, lists, dicts and other pytree nodes; {fix}, or set pipeline.microbatches to 1"
        )


def snapshot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The same arguments, with copies of objects that a run may change (a key-value cache, for example)."""

    def copied(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (torch.Tensor, torch.nn.Module, bool, int, float, str)):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except Exception:
            # an object that cannot be copied is used as it is
            return leaf

    call: Call = pytree.tree_map(copied, (args, kwargs))
    return call


def signature(call: Call) -> tuple[Any, ...]:
    """The key of a profile: structure, shapes, dtypes, layouts, and values other than tensors."""
    leaves, spec = pytree.tree_flatten(call)
    return (spec, *(_sign(leaf) for leaf in leaves))


def outline(call: Call) -> tuple[Any, ...]:
    """The parts of a signature that decide which code runs, without sizes: structure, dtypes, flags and strings."""
    leaves, spec = pytree.tree_flatten(call)
    return (spec, *(_outlined(leaf) for leaf in leaves))


def _outlined(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dim(), leaf.dtype
    return (type(leaf), leaf) if leaf is None or isinstance(leaf, (bool, str)) else type(leaf)


def _sign(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        layout = leaf.global_layout if isinstance(leaf, GlobalTensor) else None
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, layout)
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return (type(leaf), leaf)
