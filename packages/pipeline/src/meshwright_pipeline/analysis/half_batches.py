"""What is made of half of the rows, against what is made of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright_pipeline.analysis.module_state import State, TensorValues
from meshwright_pipeline.pytrees import differing_dims, leaves_of
from meshwright_pipeline.trace.state_writes import Place

Tensor = torch.Tensor

FAR = 1e-4
"""By how much of the largest value a row must differ: rounding differs by less."""
HUGE = 1e4
"""How many times as large as usual values those of a mask are at least."""


def half_of(whole: Tensor, shape: Sequence[int], half: int) -> Tensor | None:
    """The half of a value that has this shape; None where it has none such."""
    if whole.dim() != len(shape):
        return None
    for dim, size in enumerate(shape):
        if whole.shape[dim] != size:
            if whole.shape[dim] != 2 * size:
                return None
            whole = whole.narrow(dim, half * size, size)
    return whole


def row_difference(whole: Any, made: Any, half: int, numbers_too: frozenset[int] = frozenset()) -> str:
    """How what was made of a half differs from what was made of all rows.

    "rows": in fractions that have rows, or at a place of `numbers_too`; "other": elsewhere, or it cannot be compared; else "".
    """
    one, other = leaves_of(whole), leaves_of(made)
    if len(one) != len(other):
        return "other"
    found = ""
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            plain = isinstance(a, (bool, int, float, str)) and isinstance(b, (bool, int, float, str))
            found = "other" if type(a) is not type(b) or (plain and a != b) else found
            continue
        own = half_of(a, b.shape, half)
        if own is None or own.dtype != b.dtype:
            found = "other"
        elif differs(own, b):
            fractions = b.is_floating_point() or b.is_complex()
            if fractions and (differing_dims(a, b) or place in numbers_too):
                return "rows"
            found = "other"
    return found


def differs(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    size = torch.nan_to_num(torch.view_as_real(one) if one.is_complex() else one, 0.0, 0.0, 0.0).abs()
    usual = float(size.median()) if size.numel() else 0.0
    if usual and not one.is_complex():  # what masks leave behind, the same in both, measures nothing
        size = size.masked_fill((size > HUGE * usual) & (one == other), 0.0)
    limit = FAR * float(size.max()) if size.numel() else 0.0
    return not torch.allclose(one, other, rtol=0.0, atol=limit, equal_nan=True)


def written_from_rows(before: State, whole: State, half: State) -> Place | None:
    """A tensor that a forward overwrites with what it makes of the rows that it is given."""
    for at, old in before.items():
        one, other = whole.get(at), half.get(at)
        if not (
            isinstance(old, TensorValues)
            and isinstance(one, TensorValues)
            and isinstance(other, TensorValues)
        ):
            continue
        if one.like(old) and other.like(old) and old != one and differs(one.tensor, other.tensor):
            return at
    return None
