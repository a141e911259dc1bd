"""Check that boxes tile a tensor: each element is in exactly one of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from meshwright_dtensor.sharding.boxes import Box, box_numel, intersect


def coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not tile a tensor of `shape`, as the predicate of "the parts ..."; None if they do."""
    covered = 0
    for box in boxes:
        if len(box) != len(shape) or any(
            start + length > size for (start, length), size in zip(box, shape, strict=True)
        ):
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
