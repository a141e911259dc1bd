"""Whether a call on a mesh has the result of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright_dtensor.errors import MeshwrightError

KINDS = ("equal", "refused", "silent", "internal", "hang", "crash")
TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8}
UNDEFINED = frozenset("empty empty_like new_empty empty_strided new_empty_strided empty_permuted".split())
"""Operators whose result has no defined values."""


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        kind: one of `KINDS`. Refused: by one of our errors, on all ranks. Internal: any other exception.
        sharded: a rank holds a part of some input.
        gathered: an input was gathered in the call, by the communication log.
        tier: the highest tier of the local programs that were made, 0 if there were none.
    """

    op: str
    case: str
    kind: str = "equal"
    reason: str = ""
    sharded: bool = False
    gathered: bool = False
    tier: int = 0
    seconds: float = 0.0


@dataclass
class Values:
    """Plain results of a call: leaves and structure, gradients, whether a written tensor is the result, the generator."""

    results: list[Any]
    structure: str
    gradients: list[Tensor | None]
    same: bool
    generator: Tensor


def on_shards(outcome: Outcome) -> bool:
    """Whether the operator ran on shards: equal, with no input gathered."""
    return outcome.sharded and not outcome.gathered and outcome.kind == "equal"


def of_errors(single: Exception | None, parallel: Exception | None) -> tuple[str, str]:
    """Kind and reason where one device, the mesh, or both have raised."""
    if parallel is None:
        return "silent", f"no error, one device: {short(single)}"
    if isinstance(parallel, MeshwrightError):
        return ("refused", short(parallel)) if single is None else ("equal", "")
    if single is None:
        return "internal", short(parallel)
    if isinstance(parallel, type(single)) or isinstance(single, type(parallel)):
        return "equal", ""
    return "internal", f"{short(parallel)}; one device: {short(single)}"


def differs(op: Any, single: Values, parallel: Values) -> str:
    """How the results differ; empty if they do not."""
    drawn = not torch.equal(single.generator, parallel.generator)
    if drawn:
        return "the generator ends in another state"
    if single.same != parallel.same:
        return f"a written tensor is the result: {single.same} on one device, {parallel.same} here"
    if len(single.results) != len(parallel.results):
        return f"{len(parallel.results)} results, {len(single.results)} on one device"
    for place, (expected, actual) in enumerate(zip(single.results, parallel.results, strict=True)):
        text = _values_differ(expected, actual, values=op.name not in UNDEFINED)
        if text:
            return f"result {place}: {text}"
    for place, (gradient, other) in enumerate(zip(single.gradients, parallel.gradients, strict=True)):
        text = _values_differ(gradient, other, zero_is_none=True)
        if text:
            return f"gradient {place}: {text}"
    return ""


def _values_differ(expected: Any, actual: Any, values: bool = True, zero_is_none: bool = False) -> str:
    if zero_is_none and (expected is None) != (actual is None):
        there = actual if expected is None else expected
        return "" if not there.any() else f"is {'there' if expected is None else 'None'} only here"
    if not isinstance(expected, Tensor):
        if isinstance(expected, float) and isinstance(actual, float):
            return (
                ""
                if abs(expected - actual) <= 1e-8 * abs(expected) or expected != expected
                else f"{actual}, {expected}"
            )
        same = type(expected) is type(actual) and (not values or expected == actual)
        return "" if same else f"{actual!r}, {expected!r} on one device"[:160]
    if not isinstance(actual, Tensor):
        return f"{type(actual).__name__}, a tensor on one device"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"{actual.dtype} {list(actual.shape)}, {expected.dtype} {list(expected.shape)} on one device"
    if not values or expected.numel() == 0:
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        count = int((expected != actual).sum())
        return f"{count} of {expected.numel()} elements differ" if count else ""
    if expected.dtype.itemsize == 1:
        # torch has no arithmetic for eight bits
        expected, actual = expected.float(), actual.float()
    tolerance = TOLERANCE.get(expected.dtype, 1e-4)
    if torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return (
        f"differs by {float((actual - expected).abs().max()):.2e}, largest {float(expected.abs().max()):.2e}"
    )


def short(error: Exception | None) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
