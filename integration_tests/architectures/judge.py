"""The verdict of one run: passed, wrong numbers, or an error with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from meshwright_parallel.verification.compare import NOISE_REACH
from meshwright_parallel.verification.report import Comparison

TOLERANCES = MappingProxyType({torch.float32: 1e-5, torch.float64: 1e-6})


@dataclass(frozen=True)
class Verdict:
    """One architecture in one layout.

    Attributes:
        kind: "passed", "refused" (by one of our errors, when planning or in `parallelize`), "wrong" (numbers differ by
            more than the tolerance of a tensor's largest value), "error" (an exception, with its message) or "hang" (no
            answer in time).
        reason: empty when it passed.
        worst: largest difference of a gradient relative to its own largest value; of those that one device determines.
        noise: gradients that are rounding noise on one device too, and as small in parallel.
        sharded: parameters of which a rank holds a part only.
        seconds: for running.
        wrong: what differs too much, and by how much of its largest value.
        float64: `worst` of the run in float64 that decided, where one device does not determine a float32 value.
        microbatches: of a pipeline; 0 without one.
        compiled, calls: of compiled regions: calls that ran compiled, and all calls from the third of their kind on.
        eager: why calls ran as they are, the most frequent reason first.
    """

    kind: str
    reason: str = ""
    worst: float = math.nan
    noise: int = 0
    sharded: int = 0
    parameters: int = 0
    seconds: float = 0.0
    wrong: tuple[tuple[str, float], ...] = ()
    float64: float = math.nan
    microbatches: int = 0
    compiled: int = 0
    calls: int = 0
    eager: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def judge(
    comparisons: Iterable[Comparison],
    sharded: int,
    parameters: int,
    noise: frozenset[str] = frozenset(),
    disputed: frozenset[str] = frozenset(),
) -> Verdict:
    """The verdict over every loss, gradient, parameter and buffer of a step.

    Args:
        noise: labels of values that one rounding of the weights changes beyond recognition on one device: zero, but for
            what rounding leaves of larger values. They are held to the largest value of their kind instead of their own.
        disputed: labels of the values in question; empty for all.
    """
    comparisons = list(comparisons)
    largest: dict[str, float] = {}
    for c in comparisons:
        largest[c.kind] = max(largest.get(c.kind, 0.0), c.scale)
    comparisons = [
        replace(c, bound=c.tolerance * largest[c.kind]) if label(c.kind, c.name) in noise else c
        for c in comparisons
        if not disputed or label(c.kind, c.name) in disputed
    ]
    measured = [c.relative for c in comparisons if c.kind == "gradient" and c.measured]
    unmeasured = sum(c.kind == "gradient" and not c.measured for c in comparisons)
    wrong = sorted((c for c in comparisons if not c.ok), key=_how_wrong, reverse=True)
    if not measured and not disputed:
        return Verdict("error", "no gradient could be compared", sharded=sharded, parameters=parameters)
    reason = "; ".join(_told(c) for c in wrong[:3])
    if len(wrong) > 3:
        reason += f"; and {len(wrong) - 3} more of {len(comparisons)}"
    kind = "wrong" if wrong else "passed"
    return Verdict(
        kind,
        reason,
        max(measured, default=0.0),
        unmeasured,
        sharded,
        parameters,
        wrong=tuple((label(c.kind, c.name), c.relative) for c in wrong),
    )


def decided(verdict: Verdict, in_float64: Verdict, rounding: Mapping[str, float]) -> Verdict:
    """The verdict on a run whose float32 values differ, given the same run in float64.

    It passes if the float64 run does and if one device is no more certain of its own float32 values than the two runs
    agree on: each that differs may do so by NOISE_REACH times of what rounding does to it on one device, or as far as it moves
    any value of its kind there (where a ReLU's sign turns on it, another one turns in another run).

    Args:
        rounding: label -> how far rounding moves the value on one device, relative to its largest value.
    """
    largest: dict[str, float] = {}
    for name, moved in rounding.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), moved)
    sure = [
        name
        for name, relative in verdict.wrong
        if not relative <= max(NOISE_REACH * rounding.get(name, 0.0), largest.get(name.split()[0], 0.0))
    ]
    if in_float64.passed and not sure:
        return replace(verdict, kind="passed", reason="", float64=in_float64.worst)
    told = f"; rounding alone moves it by {rounding.get(verdict.wrong[0][0], math.nan):.1e} on one device"
    return replace(
        verdict, reason=f"{verdict.reason}{told}; in float64: {in_float64.kind} {in_float64.reason}"
    )


def label(kind: str, name: str) -> str:
    """What a compared tensor is called in a verdict."""
    return f"{kind} {name}".strip()


def _how_wrong(comparison: Comparison) -> float:
    return comparison.difference / comparison.bound if comparison.bound else comparison.relative


def _told(comparison: Comparison) -> str:
    how = (
        comparison.note
        if math.isinf(comparison.difference)
        else f"{comparison.relative:.1e} of {comparison.scale:.1e}"
    )
    return f"{label(comparison.kind, comparison.name)} {how}"
