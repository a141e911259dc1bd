"""Compares results for half of the rows with those for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright_pipeline.analysis.module_state import State, TensorValues
from meshwright_pipeline.pytrees import differing_dims, leaves_of
from meshwright_pipeline.trace.state_writes import Place

Tensor = torch.Tensor

FAR = 1e-4
"""Relative difference from which values count as different. Rounding differs by less."""
HUGE = 1e4
"""Values this many times larger than the median are mask values."""


def half_of(whole: Tensor, shape: Sequence[int], half: int) -> Tensor | None:
    """Half number `half` of a tensor, with the given shape; None if there is none."""
    if whole.dim() != len(shape):
        return None
    for dim, size in enumerate(shape):
        if whole.shape[dim] != size:
            if whole.shape[dim] != 2 * size:
                return None
            whole = whole.narrow(dim, half * size, size)
    return whole


def row_difference(whole: Any, part: Any, half: int, scalars: frozenset[int] = frozenset()) -> str:
    """How the result for one half differs from the result for all rows.

    "rows": in floating-point values with rows, or in a leaf of `scalars`; "other": elsewhere, or not comparable; "": not.
    """
    leaves, others = leaves_of(whole), leaves_of(part)
    if len(leaves) != len(others):
        return "other"
    difference = ""
    for place, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            plain = isinstance(a, (bool, int, float, str)) and isinstance(b, (bool, int, float, str))
            difference = "other" if type(a) is not type(b) or (plain and a != b) else difference
            continue
        expected = half_of(a, b.shape, half)
        if expected is None or expected.dtype != b.dtype:
            difference = "other"
        elif differs(expected, b):
            fractions = b.is_floating_point() or b.is_complex()
            if fractions and (differing_dims(a, b) or place in scalars):
                return "rows"
            difference = "other"
    return difference


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    size = torch.nan_to_num(torch.view_as_real(a) if a.is_complex() else a, 0.0, 0.0, 0.0).abs()
    median = float(size.median()) if size.numel() else 0.0
    # equal mask values do not count for the scale
    if median and not a.is_complex():
        size = size.masked_fill((size > HUGE * median) & (a == b), 0.0)
    limit = FAR * float(size.max()) if size.numel() else 0.0
    return not torch.allclose(a, b, rtol=0.0, atol=limit, equal_nan=True)


def written_from_rows(before: State, whole: State, half: State) -> Place | None:
    """A tensor that a forward overwrites with values that depend on its rows; None if there is none."""
    for at, old in before.items():
        new, other = whole.get(at), half.get(at)
        if not isinstance(old, TensorValues) or not isinstance(new, TensorValues):
            continue
        if not isinstance(other, TensorValues):
            continue
        if new.like(old) and other.like(old) and old != new and differs(new.tensor, other.tensor):
            return at
    return None
