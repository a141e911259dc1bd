"""The sizes of a batch, as strategies and planners see it: rows and, where there is one, a sequence.  Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """What the tensors of one batch have in common.

    Attributes:
        rows: size of dim 0 of its first tensor that has dims, None where there is none.
        tokens: size of dim 1 of its first tensor that holds a sequence: integers of two dims (ids), or numbers of three
            (embeddings); None where there is none.
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
