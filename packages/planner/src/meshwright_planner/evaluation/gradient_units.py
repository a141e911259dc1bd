"""The parameters of each unit whose gradients ranks sum, as the axes that own some of them leave them to one rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright_dtensor.sharding.states import parse_state
from meshwright_dtensor.strategy import ParameterSize

UnitSizes = tuple[ParameterSize, ...]
"""The parameters of one unit."""


def summed_units(
    units: Iterable[Mapping[str, ParameterSize]],
    owners: Mapping[str, frozenset[str]],
    stated: Mapping[str, Mapping[str, str]],
    degrees: Mapping[str, int],
    summed: Iterable[str],
) -> tuple[UnitSizes, ...]:
    """The parameters of each unit whose gradients are summed over axes of `summed`.

    Args:
        units: per unit its parameters by name, whole on the axes that own some.
        owners: axis -> names of the parameters that its strategy distributes over its ranks.
        stated: name -> axis -> state as text, of the parameters that are sharded (see Strategy.placements).
        degrees: of every axis.
        summed: axes on which gradients of other parameters are partial.
    """
    over = frozenset(summed)
    shared: dict[UnitSizes, UnitSizes] = {}
    result: list[UnitSizes] = []
    for unit in units:
        sizes: list[ParameterSize] = []
        owned: Counter[tuple[ParameterSize, int]] = Counter()
        for name, size in unit.items():
            axes = frozenset(axis for axis, names in owners.items() if name in names)
            if not axes:
                sizes.append(size)
            elif not over <= axes:
                states = stated.get(name, {})
                ranks = math.prod(degrees[axis] for axis in axes if axis not in states)
                owned[_sharded(size, states, degrees), ranks] += 1
        # parameters that are not sharded are dealt out over the ranks of the owning axes
        for (size, ranks), count in owned.items():
            sizes += [size] * -(-count // ranks)
        summed_unit = tuple(sizes)
        # equal units are one object
        result.append(shared.setdefault(summed_unit, summed_unit))
    return tuple(result)


def _sharded(size: ParameterSize, states: Mapping[str, str], degrees: Mapping[str, int]) -> ParameterSize:
    shape, sharded = list(size.shape), list(size.sharded_dims)
    for axis, text in states.items():
        state = parse_state(text, degrees[axis])
        if isinstance(state, int) and degrees[axis] > 1 and int(state) not in sharded:
            shape[state] = -(-shape[state] // degrees[axis])
            sharded.append(int(state))
    return replace(size, shape=tuple(shape), sharded_dims=tuple(sharded))
