"""Names of repeated things written once: "model.layers.*.mlp" for the copies of a block.

A pattern stands for a name only if everything it matches wants the same; otherwise exact names are written.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


class Collapser:
    """Turns names into patterns, knowing which modules are copies of each other."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        # outer groups first: the inner ones are recorded for the representative of the outer
        ordered = sorted(groups, key=lambda g: g[0].count("."))
        self._members: dict[tuple[str, ...], tuple[tuple[str, ...], frozenset[int]]] = {}
        self._lengths: list[int] = []
        for group in ordered:
            parts = [tuple(name.split(".")) for name in group]
            if len({len(p) for p in parts}) != 1:
                continue
            differ = frozenset(i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1)
            for member in parts:
                self._members[member] = (parts[0], differ)
            self._lengths.append(len(parts[0]))
        self._lengths = sorted(set(self._lengths))

    def pattern(self, name: str) -> str:
        """The pattern for a parameter or module name; the name itself where nothing repeats."""
        parts = tuple(name.split("."))
        stars: set[int] = set()
        for length in self._lengths:
            found = self._members.get(parts[:length])
            if found is not None:
                parts = found[0] + parts[length:]
                stars |= found[1]
        return ".".join("*" if i in stars else part for i, part in enumerate(parts))

    def collapse(self, wanted: Mapping[str, T]) -> list[tuple[str, T, list[str]]]:
        """(pattern, what is wanted, names it stands for) that together give every name of `wanted` what it wants.

        Patterns come in the order in which their first name occurs.  No name matches two that disagree: where "*"
        would match a name that wants something else (it matches dots too), digits are spelt out as "[0-9]", and
        where that does not help either, the names are.
        """
        members: dict[str, list[str]] = defaultdict(list)
        for name in wanted:
            members[self.pattern(name)].append(name)
        result: list[tuple[str, T, list[str]]] = []
        for pattern, names in members.items():
            if pattern == names[0]:
                result.append((pattern, wanted[pattern], names))
            elif _fits(pattern, wanted, wanted[names[0]]):
                result.append((pattern, wanted[names[0]], names))
            else:
                result.extend(_by_digits(pattern, names, wanted))
        return result


def _by_digits(pattern: str, names: list[str], wanted: Mapping[str, T]) -> list[tuple[str, T, list[str]]]:
    spelt: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = zip(pattern.split("."), name.split("."))
        spelt[".".join("[0-9]" * len(n) if p == "*" and n.isdigit() else n for p, n in parts)].append(name)
    result: list[tuple[str, T, list[str]]] = []
    for exact, alike in spelt.items():
        if len(alike) > 1 and _fits(exact, wanted, wanted[alike[0]]):
            result.append((exact, wanted[alike[0]], alike))
        else:
            result.extend((name, wanted[name], [name]) for name in alike)
    return result


def _fits(pattern: str, wanted: Mapping[str, T], value: T) -> bool:
    """Whether everything that `pattern` matches wants `value`."""
    match = re.compile(fnmatch.translate(pattern)).match
    return all(other == value for name, other in wanted.items() if match(name))
