"""The sizes of a batch: rows, and the length of its sequence if there is one. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchSize:
    """Rows and sequence length of one batch.

    Attributes:
        rows: size of dim 0 of its first tensor with dims, or None.
        tokens: size of dim 1 of its first tensor with a sequence: 2-dim integers (ids), or 3-dim floats (embeddings); or None.
    """

    rows: int | None
    tokens: int | None = None

    @classmethod
    def of(cls, tensors: Iterable[tuple[Sequence[int], bool]]) -> BatchSize:
        """From (shape, whether it is floating point) of every tensor of the batch, in order."""
        rows = tokens = None
        for shape, floating in tensors:
            if rows is None and len(shape):
                rows = shape[0]
            if tokens is None and len(shape) == (3 if floating else 2):
                tokens = shape[1]
        return cls(rows, tokens)


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call with `batch`: a dict of keywords, a tuple or list, or one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}
