"""The example batch: arguments of the model's forward and their named tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.utils.names import path_name
from meshwright_planner._torch import is_fake, pytree


@dataclass(frozen=True)
class Batch:
    """Positional and keyword arguments of one forward call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """From a user's batch: a mapping (keywords), a tuple or list (positions), or one tensor.

        Raises UsageError: it is none of these, holds no tensor, or has no rows.
        """
        if isinstance(batch, Mapping):
            bad = [key for key in batch if not isinstance(key, str)]
            if bad:
                text = f"batch key {bad[0]!r} is not a string; a mapping is passed as keyword arguments"
                raise UsageError(text)
            result = cls((), dict(batch))
        elif isinstance(batch, torch.Tensor):
            result = cls((batch,), {})
        elif isinstance(batch, (tuple, list)):
            result = cls(tuple(batch), {})
        else:
            text = f"batch is a {type(batch).__name__}; give a dict of keyword arguments, a tuple of arguments or a tensor"
            raise UsageError(text)
        if not result._named:
            leaves = pytree.tree_leaves((result.args, result.kwargs))
            kinds = ", ".join(sorted({type(x).__name__ for x in leaves}))
            raise UsageError(
                f"batch holds no tensor{f', only {kinds}' if kinds else ''}; give one example of what model(...) is called with, "
                "its tensors in dicts, tuples, lists or classes that are registered with torch.utils._pytree"
            )
        if not result.size:
            name, tensor = next((name, t) for name, t in result.tensors() if t.dim())
            text = f"batch has no rows: {name!r} is of shape {tuple(tensor.shape)}; give an example with one row at least"
            raise UsageError(text)
        return result

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors with their names: the keyword or position, then the path inside it ("0", "input_ids")."""
        return iter(self._named)

    @cached_property
    def _named(self) -> tuple[tuple[str, torch.Tensor], ...]:
        leaves, _ = pytree.tree_flatten_with_path((self.args, self.kwargs))
        return tuple((path_name(path[1:]), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor))

    @property
    def size(self) -> int:
        """Rows of the batch: size of dim 0 of its first tensor that has dims, 1 when none has."""
        return next((t.shape[0] for _, t in self.tensors() if t.dim()), 1)

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a row, None where the batch holds no sequence (see BatchSize)."""
        return self.sizes.tokens

    @cached_property
    def sizes(self) -> BatchSize:
        """Rows and tokens."""
        return BatchSize.of((tuple(t.shape), t.is_floating_point()) for _, t in self.tensors())

    def map(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Batch:
        """The same arguments with every tensor replaced by `change(name, tensor)`."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        names = self.tensors()
        leaves = [change(next(names)[0], x) if isinstance(x, torch.Tensor) else x for x in leaves]
        return Batch(*pytree.tree_unflatten(leaves, spec))


def scaled(batch: Batch, rows: int) -> Batch:
    """A batch of `rows` rows, from an example of another size."""
    size = batch.size

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        if tensor.is_floating_point() or tensor.is_meta or is_fake(tensor):
            return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        # models read integers
        return tensor[torch.arange(rows, device=tensor.device) % size]

    return batch.map(change)


def check_signature(model: nn.Module, batch: Batch) -> None:
    """Refuse a batch that the model's forward does not take: a UsageError names the offending key and the accepted ones."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        accepted = ", ".join(str(p) for p in signature.parameters) or "nothing"
        text = f"{type(model).__name__}.forward does not take this batch: {error}; it accepts: {accepted}"
        raise UsageError(text) from None
