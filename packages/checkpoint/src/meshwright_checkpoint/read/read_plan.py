"""Read plan of the ranks of one machine: which rank reads which bytes, every block once.

Every rank computes the same plan from the byte ranges that all of them want.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from meshwright_checkpoint.format.checksum import BLOCK
from meshwright_checkpoint.shards.write_shares import balanced_budgets
from meshwright_dtensor.sharding.boxes import Box


@dataclass(frozen=True, order=True)
class StoredRange:
    """Bytes of a part of a tensor: `nbytes` of `file` from `offset` on. Checksum blocks count from there."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ReadChunk:
    """Bytes of a stored part that are read and verified at once.

    start, nbytes: range in the part. It starts with a block, and ends with a block or with the part.
    consumers: members of the machine that need some of these bytes, ascending. `reader` is the one that reads them.
    """

    stored: StoredRange
    start: int
    nbytes: int
    consumers: tuple[int, ...]
    reader: int

    @property
    def at(self) -> int:
        """Offset in the file."""
        return self.stored.offset + self.start


WantedRanges: TypeAlias = Mapping[StoredRange, Sequence[tuple[int, int]]]
"""Per part, the byte ranges (start, end) that a member wants."""


def boxes_in_range(shape: Sequence[int], box: Box, low: int, high: int) -> list[Box]:
    """The elements of `box` with flat index in [low, high) of a row-major array of `shape`, as boxes in order."""
    if not shape:
        return [()] if low <= 0 < high else []
    row = prod(shape[1:])
    if not row or high <= low:
        return []
    start, length = box[0]

    def part_of_row(index: int, low: int, high: int) -> list[Box]:
        if not start <= index < start + length:
            return []
        return [((index, 1), *rest) for rest in boxes_in_range(shape[1:], box[1:], low, high)]

    first, head = divmod(low, row)
    last, tail = divmod(high, row)
    if first == last:
        return part_of_row(first, head, tail)
    boxes = []
    if head:
        boxes += part_of_row(first, head, row)
        first += 1
    whole, end = max(first, start), min(last, start + length)
    if whole < end:
        boxes.append(((whole, end - whole), *box[1:]))
    return boxes + part_of_row(last, 0, tail) if tail else boxes


def flat_range(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Flat indices of the first element of `box` in a row-major array of `shape`, and after the last."""
    first = last = 0
    for size, (start, length) in zip(shape, box, strict=True):
        first, last = first * size + start, last * size + start + length - 1
    return first, last + 1


def wanted_ranges(shape: Sequence[int], itemsize: int, box: Box, step: int) -> Iterator[tuple[int, int]]:
    """Byte ranges (start, end) to read for `box` of a row-major array of `shape`: whole blocks, one range per `step` bytes."""
    low, high = flat_range(shape, box)
    nbytes = prod(shape) * itemsize
    for at in range(low * itemsize // step * step, high * itemsize, step):
        inside = boxes_in_range(shape, box, at // itemsize, min((at + step) // itemsize, prod(shape)))
        if inside:
            first, last = flat_range(shape, inside[0])[0], flat_range(shape, inside[-1])[1]
            yield first * itemsize // BLOCK * BLOCK, min(-(-last * itemsize // BLOCK) * BLOCK, nbytes)


def plan_reads(wants: Sequence[WantedRanges], step: int) -> list[ReadChunk]:
    """All chunks to read, in file order.

    Args:
        wants: per member the ranges from `wanted_ranges`, for the same `step`.
        step: most bytes of a chunk; a multiple of BLOCK.
    """
    needed: dict[tuple[StoredRange, int], list[tuple[int, int, int]]] = defaultdict(list)
    for member, parts in enumerate(wants):
        for stored, pieces in parts.items():
            for start, end in pieces:
                needed[stored, start // step].append((start, end, member))
    chunks = [
        ReadChunk(stored, start, end - start, consumers, consumers[0])
        for (stored, _), pieces in sorted(needed.items(), key=lambda item: item[0])
        for start, end, consumers in _merge(pieces)
    ]
    return _assign_readers(chunks, len(wants))


def _merge(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Join overlapping ranges (start, end, member), each with all its members."""
    result: list[tuple[int, int, set[int]]] = []
    for start, end, member in sorted(pieces):
        if result and start < result[-1][1]:
            first, last, members = result.pop()
            result.append((first, max(last, end), members | {member}))
        else:
            result.append((start, end, {member}))
    return [(start, end, tuple(sorted(members))) for start, end, members in result]


def _assign_readers(chunks: Sequence[ReadChunk], members: int) -> list[ReadChunk]:
    """Assign readers: shared chunks go mostly to the members that have least to read.

    Each member gets consecutive chunks, because the system prefetches for sequential readers.
    """
    loads = [0] * members
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, chunk in enumerate(chunks):
        if len(chunk.consumers) == 1:
            loads[chunk.reader] += chunk.nbytes
        else:
            groups[chunk.consumers].append(number)
    assigned = list(chunks)
    for consumers, numbers in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        total = sum(chunks[number].nbytes for number in numbers)
        budgets = balanced_budgets([loads[member] for member in consumers], total)
        position = 0
        for number in numbers:
            nbytes = chunks[number].nbytes
            while position < len(consumers) - 1 and budgets[position] * 2 < nbytes:
                position += 1
                # carry over the rest of its budget
                budgets[position] += budgets[position - 1]
            budgets[position] -= nbytes
            loads[consumers[position]] += nbytes
            assigned[number] = replace(chunks[number], reader=consumers[position])
    return assigned
