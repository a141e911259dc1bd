"""Sequence parallelism that is asked for: which degrees can do it, and what to say where none can.

Which combinations of degrees are legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.strategy.plan_request import KEYWORDS
from meshwright_planner.evaluation.context import SHARED, Basis, Setting
from meshwright_planner.placement.legal_rows import balanced


def _divides_sequence(setting: Setting, degree: int, lengths: Iterable[int]) -> bool:
    """Whether a searched axis of this degree can split sequences of these lengths (a rank's), if that is asked for."""
    if not setting.sequence_parallel or setting.world_size == 1:
        return True
    return degree > 1 and all(balanced(length, degree) for length in lengths)


def sequence_hint(setting: Setting) -> str:
    """What to add to an error of placements when it is asked for; else nothing."""
    if not setting.sequence_parallel:
        return ""
    return "; sequence_parallel=True needs placements that split the sequence between blocks: leave it out to do without them"


def _sequence_refusal(setting: Setting, legal: Iterable[Mapping[str, int]]) -> str:
    """What to say where it is asked for, and is all that forbids these combinations of degrees."""
    searched = [axis for axis, strategy in setting.strategies.items() if strategy.placement_search]
    needs = "sequence_parallel=True needs a tensor axis of a degree above 1"
    if all(degrees[axis] == 1 for degrees in legal for axis in searched):
        given = {a: d for a, d in setting.pins.items() if a in searched} or dict(setting.pins)
        asked = ", ".join(f"{axis}={degree}" for axis, degree in given.items())
        return f"{needs}, and {asked or 'nothing that is legal'} leaves it none: change that, or leave sequence_parallel out"
    pinned = ", ".join(f"{axis}={setting.pins[axis]}" for axis in searched if axis in setting.pins)
    beside = f"; {pinned} does not" if pinned else ""
    return (
        f"{needs} that divides the sequence ({setting.batch.sequence_length} tokens) on each rank{beside}: pad the batch, change "
        "the degrees, or leave sequence_parallel out"
    )


TENSOR = "tp"
"""The axis whose placements are searched unasked, whatever other such axes the user pins."""


def combinations(basis: Basis) -> list[dict[str, int]]:
    """Every legal combination of degrees: product equal to the world size, pins kept."""
    setting = basis.setting
    requests = {axis: basis.request(axis) for axis in setting.strategies}
    legal = {
        axis: [d for d in strategy.degrees(requests[axis]) if d == setting.pins.get(axis, d)]
        for axis, strategy in setting.strategies.items()
    }
    for axis, degree in setting.pins.items():
        if axis in legal and not legal[axis]:
            length = setting.batch.sequence_length
            rows = f"{setting.batch.size}" + (f" rows of {length} tokens" if length is not None else "")
            allowed = list(setting.strategies[axis].degrees(requests[axis]))
            options, word = ", ".join(map(str, allowed)), KEYWORDS.get(axis, axis)
            nearest = min(allowed, key=lambda d: (abs(d - degree), d), default=1)
            reason = setting.strategies[axis].refusal(requests[axis], degree)
            if reason is not None:
                raise PlanError(f"degrees.{axis}", degree, reason, options)
            raise UsageError(
                f"{word}={degree} is not a legal degree for world_size {setting.world_size} and a batch of "
                f"{rows}: strategy {setting.strategies[axis].name!r} allows {options}; the nearest is {word}={nearest}"
            )
    whole = [
        c for c in _products(legal, setting.world_size) if _one_search(basis, c) and _rows_divide(basis, c)
    ]
    found = [c for c in whole if _sequence_divides(basis, c)]
    if setting.stage:  # who asks for a stage means ranks to share something
        found = [c for c in found if c.get(SHARED, 1) > 1] or found
    if whole and not found:
        raise UsageError(_sequence_refusal(setting, whole))
    if not found:
        shown = "; ".join(f"{a}: {', '.join(map(str, d))}" for a, d in legal.items()) or "none is installed"
        raise UsageError(
            f"no combination of degrees multiplies to world_size {setting.world_size} (legal degrees: {shown}); "
            f"{_pin(unasked(basis))}change the batch size, the pinned degrees or world_size"
        )
    return found


def unasked(basis: Basis) -> dict[str, list[int]]:
    """Axis -> degrees that make a legal combination and are looked at only where the user pins them."""
    setting = basis.setting
    requests = {axis: basis.request(axis) for axis in setting.strategies}
    legal = {
        axis: [d for d in strategy.degrees(requests[axis]) if d == setting.pins.get(axis, d)]
        for axis, strategy in setting.strategies.items()
    }
    found: dict[str, list[int]] = {}
    for axis, strategy in setting.strategies.items():
        if axis in setting.pins:
            continue
        for degree in strategy.degrees(replace(requests[axis], exhaustive=True)):
            if degree not in legal[axis] and any(
                _rows_divide(basis, c) and _sequence_divides(basis, c)
                for c in _products({**legal, axis: [degree]}, setting.world_size)
            ):
                found.setdefault(axis, []).append(degree)
    return found


def named(degrees: Mapping[str, Sequence[int]]) -> str:
    """ "cp=2, cp=4"."""
    return ", ".join(f"{axis}={degree}" for axis, own in degrees.items() for degree in own)


def _pin(degrees: Mapping[str, Sequence[int]]) -> str:
    return f"pin a degree that is not tried unasked ({named(degrees)}), or " if degrees else ""


def _rows_divide(basis: Basis, degrees: Mapping[str, int]) -> bool:
    """Whether the axes that share the rows of the batch fit it together, and what the user says of them."""
    data = degrees.get("dp", 1) * degrees.get(SHARED, 1)
    if basis.setting.data not in (None, data):
        return False
    return basis.setting.batch.size % basis.batch_factor(degrees) == 0


def _sequence_divides(basis: Basis, degrees: Mapping[str, int]) -> bool:
    """Whether a searched axis can split the sequence between blocks, where that is asked for."""
    if not basis.setting.sequence_parallel:  # nothing to look at
        return True
    strategies, batch = basis.setting.strategies, basis.setting.batch
    degree = max((degrees[a] for a, s in strategies.items() if s.placement_search), default=1)
    lengths = {
        basis.local_shape(name, tuple(t.shape), degrees)[1]
        for name, t in batch.tensors()
        if t.dim() > 1 and t.shape[1] == batch.sequence_length
    }
    return _divides_sequence(basis.setting, degree, lengths)


def _one_search(basis: Basis, degrees: Mapping[str, int]) -> bool:
    """Whether placements are searched on one axis at most, or on two, where the user pins the one beside tp."""
    setting = basis.setting
    searched = [a for a, d in degrees.items() if d > 1 and setting.strategies[a].placement_search]
    return len(searched) <= 1 or (
        len(searched) == 2 and all(a in setting.pins for a in searched if a != TENSOR)
    )


def _products(legal: Mapping[str, Sequence[int]], total: int) -> Iterator[dict[str, int]]:
    if not legal:
        if total == 1:
            yield {}
        return
    axis, *others = legal
    for degree in legal[axis]:
        if total % degree == 0:
            for rest in _products({a: legal[a] for a in others}, total // degree):
                yield {axis: degree, **rest}
