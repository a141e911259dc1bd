"""Legal combinations of degrees, and the error where there is none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.sharding.boxes import shardable
from meshwright_dtensor.strategy import SearchRequest
from meshwright_dtensor.strategy.plan_request import KEYWORDS
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.evaluation.context import SHARED, Basis, Setting

TENSOR = "tp"
"""The axis whose placements may be searched together with those of another axis that the user pins."""


def combinations(basis: Basis) -> list[dict[str, int]]:
    """Every legal combination of degrees: the product is the world size, and pins are kept.

    Raises:
        PlanError: the strategy of a pinned axis refuses the degree.
        UsageError: no combination is legal.
    """
    setting = basis.setting
    requests, legal = _legal_degrees(basis)
    for axis, degree in setting.pins.items():
        if axis in legal and not legal[axis]:
            raise _illegal_pin(basis, requests[axis], axis, degree)
    products = _products(legal, setting.world_size)
    whole = [c for c in products if _one_search(setting, c) and _rows_divide(basis, c)]
    possible = [c for c in whole if _sequence_divides(basis, c)]
    if setting.stage:
        # a pinned ZeRO stage asks for ranks that share training state
        possible = [c for c in possible if c.get(SHARED, 1) > 1] or possible
    if possible:
        return possible
    if whole:
        raise UsageError(_sequence_refusal(setting, whole))
    listed = (f"{axis}: {', '.join(map(str, degrees))}" for axis, degrees in legal.items())
    shown = "; ".join(listed) or "no strategy is installed"
    pinnable = unasked(basis)
    pin = f"pin a degree that is tried only when pinned ({named(pinnable)}), or " if pinnable else ""
    raise UsageError(
        f"no combination of degrees multiplies to world_size {setting.world_size} (legal degrees: {shown}); "
        f"{pin}change the batch size, the pinned degrees or world_size"
    )


def _legal_degrees(basis: Basis) -> tuple[dict[str, SearchRequest], dict[str, list[int]]]:
    """Axis -> request to its strategy, and axis -> degrees that the strategy and the pins allow."""
    setting = basis.setting
    requests = {axis: basis.request(axis) for axis in setting.strategies}
    return requests, {
        axis: [d for d in strategy.degrees(requests[axis]) if d == setting.pins.get(axis, d)]
        for axis, strategy in setting.strategies.items()
    }


def _illegal_pin(basis: Basis, request: SearchRequest, axis: str, degree: int) -> PlanError | UsageError:
    """The error for a pinned degree that its strategy does not allow."""
    setting, strategy = basis.setting, basis.setting.strategies[axis]
    allowed = list(strategy.degrees(request))
    options, word = ", ".join(map(str, allowed)), KEYWORDS.get(axis, axis)
    reason = strategy.refusal(request, degree)
    if reason is not None:
        return PlanError(f"degrees.{axis}", degree, reason, options)
    size, length = setting.batch.size, setting.batch.sequence_length
    rows = f"{size}" if length is None else f"{count_of(size, 'row')} of {count_of(length, 'token')}"
    nearest = min(allowed, key=lambda d: (abs(d - degree), d), default=1)
    return UsageError(
        f"{word}={degree} is not a legal degree for world_size {setting.world_size} and a batch of "
        f"{rows}: strategy {strategy.name!r} allows {options}; the nearest is {word}={nearest}"
    )


def unasked(basis: Basis) -> dict[str, list[int]]:
    """Axis -> degrees of legal combinations that are only tried where the user pins them."""
    setting = basis.setting
    requests, legal = _legal_degrees(basis)
    pinnable: dict[str, list[int]] = {}
    for axis, strategy in setting.strategies.items():
        if axis in setting.pins:
            continue
        for degree in strategy.degrees(replace(requests[axis], exhaustive=True)):
            if degree not in legal[axis] and any(
                _rows_divide(basis, c) and _sequence_divides(basis, c)
                for c in _products({**legal, axis: [degree]}, setting.world_size)
            ):
                pinnable.setdefault(axis, []).append(degree)
    return pinnable


def named(degrees: Mapping[str, Sequence[int]]) -> str:
    """ "cp=2, cp=4"."""
    return ", ".join(f"{axis}={degree}" for axis, values in degrees.items() for degree in values)


def _sequence_refusal(setting: Setting, legal: Iterable[Mapping[str, int]]) -> str:
    """The error where sequence_parallel=True alone forbids these combinations of degrees."""
    searched = [axis for axis, strategy in setting.strategies.items() if strategy.placement_search]
    rule = "sequence_parallel=True needs a tensor axis with a degree above 1"
    if all(degrees[axis] == 1 for degrees in legal for axis in searched):
        pins = {a: d for a, d in setting.pins.items() if a in searched} or dict(setting.pins)
        pinned = ", ".join(f"{axis}={degree}" for axis, degree in pins.items())
        reason = f"{pinned} leaves it none" if pinned else "no legal combination of degrees has one"
        return f"{rule}, and {reason}: change that, or leave sequence_parallel out"
    pinned = ", ".join(f"{axis}={setting.pins[axis]}" for axis in searched if axis in setting.pins)
    reason = f"; {pinned} does not" if pinned else ""
    return (
        f"{rule} that leaves each rank a part of the sequence ({setting.batch.sequence_length} tokens), the last one too"
        f"{reason}: pad the batch, change the degrees, or leave sequence_parallel out"
    )


def _rows_divide(basis: Basis, degrees: Mapping[str, int]) -> bool:
    """Whether the axes that divide the rows of the batch divide them evenly, with as many data ranks as the user pinned."""
    data = degrees.get("dp", 1) * degrees.get(SHARED, 1)
    if basis.setting.data not in (None, data):
        return False
    return basis.setting.batch.size % basis.batch_factor(degrees) == 0


def _sequence_divides(basis: Basis, degrees: Mapping[str, int]) -> bool:
    """Whether a searched axis can split the sequence between blocks; True where that is not requested."""
    setting, batch = basis.setting, basis.setting.batch
    if not setting.sequence_parallel or setting.world_size == 1:
        return True
    degree = max((degrees[a] for a, s in setting.strategies.items() if s.placement_search), default=1)
    shapes = {name: tuple(t.shape) for name, t in batch.tensors() if t.shape[1:2] == (batch.sequence_length,)}
    lengths = {basis.local_shape(name, shape, degrees)[1] for name, shape in shapes.items()}
    return degree > 1 and all(shardable(length, degree) for length in lengths)


def _one_search(setting: Setting, degrees: Mapping[str, int]) -> bool:
    """Whether at most one axis is searched for placements, or two: tp and one that the user pinned."""
    searched = [a for a, d in degrees.items() if d > 1 and setting.strategies[a].placement_search]
    outer_pinned = all(a in setting.pins for a in searched if a != TENSOR)
    return len(searched) <= 1 or (len(searched) == 2 and outer_pinned)


def _products(legal: Mapping[str, Iterable[int]], total: int) -> list[dict[str, int]]:
    dividing = ([d for d in degrees if total % d == 0] for degrees in legal.values())
    return [dict(zip(legal, c)) for c in itertools.product(*dividing) if math.prod(c) == total]
