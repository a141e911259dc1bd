"""Name patterns for repeated blocks: "model.layers.*.mlp" for all copies of a block.

A pattern is used only if everything that it matches has the same value; otherwise exact names are written.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


class Collapser:
    """Turns names into patterns, given the groups of modules that are copies of each other."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        # outer groups first, because inner groups exist only in the first module of an outer group
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
            member = self._members.get(parts[:length])
            if member is not None:
                first, differ = member
                parts = first + parts[length:]
                stars |= differ
        return ".".join("*" if i in stars else part for i, part in enumerate(parts))

    def collapse(self, wanted: Mapping[str, T]) -> list[tuple[str, T, list[str]]]:
        """(pattern, value, names that it matches), so that together every name of `wanted` gets its value.

        Patterns come in the order of their first names. No name matches two patterns with different values. "*" also matches
        dots. Where it would match a name with another value, "[0-9]" per digit is tried, and then the exact names.
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
    by_digits: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = zip(pattern.split("."), name.split("."))
        digits = ("[0-9]" * len(n) if p == "*" and n.isdigit() else n for p, n in parts)
        by_digits[".".join(digits)].append(name)
    result: list[tuple[str, T, list[str]]] = []
    for exact, same_digits in by_digits.items():
        if len(same_digits) > 1 and _fits(exact, wanted, wanted[same_digits[0]]):
            result.append((exact, wanted[same_digits[0]], same_digits))
        else:
            result.extend((name, wanted[name], [name]) for name in same_digits)
    return result


def _fits(pattern: str, wanted: Mapping[str, T], value: T) -> bool:
    """Whether everything that `pattern` matches has `value`."""
    match = re.compile(fnmatch.translate(pattern)).match
    return all(other == value for name, other in wanted.items() if match(name))
