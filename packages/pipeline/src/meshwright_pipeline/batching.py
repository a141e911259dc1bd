"""Cut a batch into microbatches, and put their results together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright_dtensor.batches import BatchSize
from meshwright_dtensor.errors import UsageError
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.trees import tensors_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


def rows_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Rows of a batch: dim 0 of its first tensor that has dims."""
    return BatchSize.of((t.shape, t.is_floating_point()) for t in tensors_of((tuple(args), kwargs))).rows


def microbatches(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[Call]:
    """The arguments of `count` calls with equally many rows each; what has not the rows of the batch is given whole.

    Raises:
        UsageError: the rows cannot be shared equally.
    """
    if count == 1:
        return [(args, kwargs)]
    rows = rows_of(args, kwargs)
    if rows is None or rows % count:
        what = "the batch has no rows" if rows is None else f"a batch of {rows} rows"
        fix = "pad the batch, drop its rest, or change pipeline.microbatches"
        raise UsageError(f"{what} cannot be cut into {count} equal microbatches; {fix}")
    step = rows // count
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def part(leaf: Any, index: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        return leaf[index * step : (index + 1) * step]

    return [pytree.tree_unflatten([part(leaf, i) for leaf in leaves], spec) for i in range(count)]


def signature(call: Call) -> tuple[Any, ...]:
    """What a profile depends on: structure, shapes and dtypes, and values that are no tensors."""
    leaves, spec = pytree.tree_flatten(call)
    return (spec, *(_sign(leaf) for leaf in leaves))


def _sign(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return (type(leaf), leaf)


def joined(results: Sequence[Any], rows: int | None) -> Any:
    """The results of all microbatches as one: rows one after the other, numbers averaged, anything else of the last.

    Args:
        rows: of one microbatch.
    """
    if len(results) == 1:
        return results[0]
    flat = [pytree.tree_flatten(result) for result in results]

    def one(leaves: tuple[Any, ...]) -> Any:
        first = leaves[0]
        if not isinstance(first, torch.Tensor):
            return leaves[-1]
        if first.dim() and first.shape[0] == rows:
            return torch.cat(leaves)
        if first.dim() == 0 and first.is_floating_point():
            return sum(leaves) / len(leaves)
        return leaves[-1]

    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([one(column) for column in columns], flat[0][1])
