"""Write plan: every box is written once. Ranks that hold copies share the work, which is split inside tensors.

Also the check that boxes cover a tensor: each element is in exactly one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.sharding.boxes import Box, box_numel, intersect

MIN_SPLIT = 32 << 10
"""Smallest number of bytes of a piece after a split."""
Item = tuple[str, Box, int]
"""(key, box, itemsize)."""


@dataclass(frozen=True)
class TensorLayout:
    """A tensor on all ranks: the boxes that each rank holds."""

    shape: tuple[int, ...]
    itemsize: int
    boxes: tuple[tuple[Box, ...], ...]


@dataclass(frozen=True)
class Piece:
    """A box of tensor `key` that one rank writes."""

    key: str
    box: Box


def plan_writes(tensors: Mapping[str, TensorLayout], ranks: int) -> list[list[Piece]]:
    """The pieces that each rank writes: only boxes that it holds, balanced in bytes.

    Raises UnsupportedError: boxes of a tensor overlap without being equal, or leave a gap.
    """
    by_holders: dict[tuple[int, ...], list[Item]] = defaultdict(list)
    for key, tensor in tensors.items():
        holders: dict[Box, list[int]] = defaultdict(list)
        for rank, boxes in enumerate(tensor.boxes):
            for box in boxes:
                holders[box].append(rank)
        problem = coverage_problem(tensor.shape, list(holders))
        if problem:
            raise UnsupportedError(f"{key} cannot be saved: the boxes that ranks hold {problem}")
        for box, ranks_of_box in holders.items():
            by_holders[tuple(ranks_of_box)].append((key, box, tensor.itemsize))
    loads = [0] * ranks
    plan: list[list[Piece]] = [[] for _ in range(ranks)]
    for holder_ranks in sorted(by_holders, key=lambda ranks: (len(ranks), ranks)):
        items = by_holders[holder_ranks]
        total = sum(box_numel(box) * size for _, box, size in items)
        budgets = balanced_budgets([loads[rank] for rank in holder_ranks], total)
        for rank, pieces in zip(holder_ranks, _distribute(items, budgets), strict=True):
            plan[rank] += [Piece(key, box) for key, box, _ in pieces]
            loads[rank] += sum(box_numel(box) * size for _, box, size in pieces)
    return plan


def balanced_budgets(loads: Sequence[int], total: int) -> list[int]:
    """Divide `total` so that the smallest loads rise to a common level."""
    order = sorted(range(len(loads)), key=lambda i: loads[i])
    level, used = loads[order[0]], 1
    left = total
    while used < len(order) and left >= (loads[order[used]] - level) * used:
        left -= (loads[order[used]] - level) * used
        level = loads[order[used]]
        used += 1
    result = [0] * len(loads)
    each, rest = divmod(left, used)
    for position, index in enumerate(order[:used]):
        result[index] = level - loads[index] + each + (position < rest)
    return result


def _distribute(items: Sequence[Item], budgets: Sequence[int]) -> list[list[Item]]:
    """Assign items to ranks, both in order. An item that exceeds a budget is split if both parts are large enough."""
    assigned: list[list[Item]] = [[] for _ in budgets]
    rank, left = 0, budgets[0]
    todo = list(reversed(items))
    while todo:
        key, box, size = todo.pop()
        nbytes = box_numel(box) * size
        last = rank == len(budgets) - 1
        if last or nbytes <= left:
            assigned[rank].append((key, box, size))
            left -= nbytes
            continue
        head, tail = split_box(box, size, left)
        assigned[rank] += [(key, part, size) for part in head]
        rank += 1
        left += budgets[rank] - sum(box_numel(part) * size for part in head)
        todo += [(key, part, size) for part in reversed(tail)]
    return assigned


def split_box(box: Box, itemsize: int, head_nbytes: int) -> tuple[list[Box], list[Box]]:
    """Cut `box` in two parts in memory order, the first of about `head_nbytes` bytes; each part is a list of boxes."""
    nbytes = box_numel(box) * itemsize
    if head_nbytes < MIN_SPLIT or nbytes - head_nbytes < MIN_SPLIT:
        return ([], [box]) if head_nbytes * 2 < nbytes else ([box], [])
    dim = next(d for d, (_, length) in enumerate(box) if length > 1)
    start, length = box[dim]
    row = nbytes // length
    count, rest = divmod(head_nbytes, row)

    def rows(first: int, number: int) -> list[Box]:
        return [(*box[:dim], (start + first, number), *box[dim + 1 :])] if number else []

    if rest < MIN_SPLIT or row - rest < MIN_SPLIT:
        count += row - rest < rest
        return rows(0, count), rows(count, length - count)
    head, tail = split_box(rows(count, 1)[0], itemsize, rest)
    return rows(0, count) + head, tail + rows(count + 1, length - count - 1)


def coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not tile a tensor of `shape`, as the predicate of "the parts ..."; None if they do."""
    covered = 0
    for box in boxes:
        fits = len(box) == len(shape) and all(sum(part) <= n for part, n in zip(box, shape, strict=True))
        if not fits:
            return f"do not fit its shape {list(shape)}: {ascii(box)[:80]}"
        if not box_numel(box):
            return "are partly empty"
        covered += box_numel(box)
    if covered != prod(shape):
        return f"hold {covered} of its {prod(shape)} elements"
    # the element count is right, so a gap implies an overlap
    return "overlap" if _overlap(boxes) else None


def _overlap(boxes: Sequence[Box]) -> bool:
    """Sweep along the dim with the most distinct starts, and compare only boxes that are open at the same time."""
    if len(boxes) < 2:
        return False
    dims = len(boxes[0])
    if not dims:
        return True
    dim = max(range(dims), key=lambda d: len({box[d][0] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        active = [other for other in active if sum(other[dim]) > box[dim][0]]
        if any(intersect(box, other) is not None for other in active):
            return True
        active.append(box)
    return False
