"""Parameters whose gradients ranks sum, as the axes that own some of them leave them to one rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright_dtensor.sharding.states import parse_state
from meshwright_dtensor.strategy.strategy import ParameterSize

Sizes = tuple[ParameterSize, ...]


def summed_units(
    units: Iterable[Mapping[str, ParameterSize]],
    owners: Mapping[str, frozenset[str]],
    stated: Mapping[str, Mapping[str, str]],
    degrees: Mapping[str, int],
    summed: Iterable[str],
) -> tuple[Sizes, ...]:
    """The parameters of each unit whose gradients are summed over axes of `summed`.

    Args:
        units: per unit its parameters by name, whole on the axes that own some.
        owners: axis -> names of the parameters that it holds for itself.
        stated: name -> axis -> state as text, of the parameters that are cut (see Strategy.placements).
        degrees: of every axis.
        summed: axes on which gradients of other parameters are partial.
    """
    over = frozenset(summed)
    alike: dict[Sizes, Sizes] = {}  # equal units are one object
    found: list[Sizes] = []
    for unit in units:
        sizes: list[ParameterSize] = []
        whole: Counter[tuple[ParameterSize, int]] = Counter()
        for name, size in unit.items():
            axes = frozenset(axis for axis, names in owners.items() if name in names)
            if not axes:
                sizes.append(size)
            elif not over <= axes:
                states = stated.get(name, {})
                left = math.prod(degrees[axis] for axis in axes if axis not in states)
                whole[_cut(size, states, degrees), left] += 1
        for (size, ranks), count in whole.items():  # what is not cut is owned by one rank each, by turns
            sizes += [size] * -(-count // ranks)
        new = tuple(sizes)
        found.append(alike.setdefault(new, new))
    return tuple(found)


def _cut(size: ParameterSize, states: Mapping[str, str], degrees: Mapping[str, int]) -> ParameterSize:
    shape, taken = list(size.shape), list(size.taken)
    for axis, text in states.items():
        state = parse_state(text, degrees[axis])
        if isinstance(state, int) and degrees[axis] > 1 and int(state) not in taken:
            shape[state] = -(-shape[state] // degrees[axis])
            taken.append(int(state))
    return replace(size, shape=tuple(shape), taken=tuple(taken))
