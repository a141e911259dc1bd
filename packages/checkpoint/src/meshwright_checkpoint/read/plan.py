"""What the ranks of one machine read of stored tensors, in which portions, and who reads which: every block once.

All of them work this out from what each of them wants, and find the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from meshwright_checkpoint.format.checksum import BLOCK
from meshwright_checkpoint.shards.write_shares import levelled
from meshwright_dtensor.sharding.boxes import Box


@dataclass(frozen=True, order=True)
class Stored:
    """Where a part of a tensor lies: `nbytes` in `file` from `offset` on. Blocks count from there."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Portion:
    """Bytes that are read and checked at once.

    stored: the part that they belong to.
    start, nbytes: in that. A portion starts with a block, and ends with one or with the part.
    takers: members of the machine that want something of it, ascending.
    reader: the one of them that reads it.
    """

    stored: Stored
    start: int
    nbytes: int
    takers: tuple[int, ...]
    reader: int

    @property
    def at(self) -> int:
        """Where it starts in the file."""
        return self.stored.offset + self.start


Runs: TypeAlias = Mapping[Stored, Sequence[tuple[int, int]]]
"""Of each part the bytes (start, end) that somebody wants."""


def within(shape: Sequence[int], box: Box, low: int, high: int) -> list[Box]:
    """What of `box` lies from element `low` to before element `high` of a row-major array of `shape`, as boxes in its order."""
    if not shape:
        return [()] if low <= 0 < high else []
    row = prod(shape[1:])
    if not row or high <= low:
        return []
    start, length = box[0]

    def some(first: int, last: int) -> list[Box]:
        first, last = max(first, start), min(last, start + length)
        return [((first, last - first), *box[1:])] if first < last else []

    def part(index: int, low: int, high: int) -> list[Box]:
        if not start <= index < start + length:
            return []
        return [((index, 1), *rest) for rest in within(shape[1:], box[1:], low, high)]

    first, head = divmod(low, row)
    last, tail = divmod(high, row)
    if first == last:
        return part(first, head, tail)
    found = []
    if head:
        found += part(first, head, row)
        first += 1
    found += some(first, last)
    return found + part(last, 0, tail) if tail else found


def ends(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """The first element of `box` in a row-major array of `shape`, and the one after the last."""
    first = last = 0
    for size, (start, length) in zip(shape, box, strict=True):
        first, last = first * size + start, last * size + start + length - 1
    return first, last + 1


def runs(shape: Sequence[int], itemsize: int, box: Box, step: int) -> Iterator[tuple[int, int]]:
    """Bytes (start, end), whole blocks, to read for `box` of a row-major array of `shape`: at most one run in every `step`
    bytes of the array.
    """
    low, high = ends(shape, box)
    nbytes = prod(shape) * itemsize
    for at in range(low * itemsize // step * step, high * itemsize, step):
        inside = within(shape, box, at // itemsize, min((at + step) // itemsize, prod(shape)))
        if inside:
            first, last = ends(shape, inside[0])[0], ends(shape, inside[-1])[1]
            yield first * itemsize // BLOCK * BLOCK, min(-(-last * itemsize // BLOCK) * BLOCK, nbytes)


def portions(wants: Sequence[Runs], step: int) -> list[Portion]:
    """What has to be read, in the order of files.

    Args:
        wants: per member what it wants, as `runs` gives it for the same `step`.
        step: most bytes of a portion; a multiple of BLOCK.
    """
    needed: dict[tuple[Stored, int], list[tuple[int, int, int]]] = defaultdict(list)
    for member, parts in enumerate(wants):
        for stored, pieces in parts.items():
            for start, end in pieces:
                needed[stored, start // step].append((start, end, member))
    found = [
        Portion(stored, start, end - start, takers, takers[0])
        for (stored, _), pieces in sorted(needed.items(), key=lambda one: one[0])
        for start, end, takers in _merged(pieces)
    ]
    return _dealt(found, len(wants))


def _merged(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start, end, member) that overlap, as one run and all its members."""
    result: list[tuple[int, int, set[int]]] = []
    for start, end, member in sorted(pieces):
        if result and start < result[-1][1]:
            first, last, members = result.pop()
            result.append((first, max(last, end), members | {member}))
        else:
            result.append((start, end, {member}))
    return [(start, end, tuple(sorted(members))) for start, end, members in result]


def _dealt(found: Sequence[Portion], members: int) -> list[Portion]:
    """What several want is shared among them, most of it by who has least to read; each reads a stretch of the files.

    A stretch, not every other portion: systems read ahead of one that reads on.
    """
    loads = [0] * members
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, portion in enumerate(found):
        if len(portion.takers) == 1:
            loads[portion.reader] += portion.nbytes
        else:
            groups[portion.takers].append(number)
    dealt = list(found)
    for takers, numbers in sorted(groups.items(), key=lambda one: (len(one[0]), one[0])):
        budgets = levelled([loads[member] for member in takers], sum(found[n].nbytes for n in numbers))
        place = 0
        for number in numbers:
            nbytes = found[number].nbytes
            while place < len(takers) - 1 and budgets[place] * 2 < nbytes:
                place += 1
                budgets[place] += budgets[place - 1]  # what it has had too much, or too little
            budgets[place] -= nbytes
            loads[takers[place]] += nbytes
            dealt[number] = replace(found[number], reader=takers[place])
    return dealt
