"""What the ranks of a pipeline hold from action to action, all actions of all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

KINDS = "FBIW"
FORWARD, WHOLE, FIRST, LATE = range(len(KINDS))


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes at the moment at which a rank holds most: kept, alive beside that, and of gradients."""

    kept: float = 0.0
    over: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.kept + self.over + self.gradients


@dataclass(frozen=True)
class StageBytes:
    """Of a microbatch on each stage, as in StageCosts: bytes, and whether the halves of a backward are halves."""

    saved: Sequence[float]
    over: Sequence[float]
    deferred_bytes: Sequence[float]
    gradients: Sequence[float]
    split: bool
    first: Sequence[float]


class RankActions:
    """The actions of each rank in its own order.

    Args:
        ranks: per rank, the kind (as in KINDS) and the stage of each action in one number: kind x stages + stage.
        stages: of the pipeline.
    """

    def __init__(self, ranks: Sequence[Sequence[int]], stages: int) -> None:
        longest = max(1, *map(len, ranks))
        nothing = len(KINDS) * stages  # of ranks that do less than others
        every = np.array([[*own, *[nothing] * (longest - len(own))] for own in ranks], dtype=np.int64)
        self._kinds, self._stages = np.divmod(every, stages)

    def held(self, sizes: StageBytes) -> tuple[tuple[float, ...], tuple[MemoryPeak, ...]]:
        """Per rank, the most bytes of activations that it holds at once, and when it holds most with all there is beside."""
        kinds, stages = self._kinds, self._stages
        saved, over, waiting, gradients, first = (
            np.asarray(own, dtype=float)[stages]
            for own in (sizes.saved, sizes.over, sizes.deferred_bytes, sizes.gradients, sizes.first)
        )
        if sizes.split:
            over = np.where(kinds == FIRST, first, over)
        zero = np.zeros_like(saved)
        if sizes.split:
            freed = {WHOLE: -saved, FIRST: waiting, LATE: -(saved + waiting)}
        else:  # the first half is all of it
            freed = {WHOLE: -saved, FIRST: -saved, LATE: zero}
        change = np.where(kinds == FORWARD, saved, zero)
        for kind, bytes_of in freed.items():
            change = np.where(kinds == kind, bytes_of, change)
        after, gained = np.cumsum(change, axis=1), np.where(self._first(sizes.split), gradients, zero)
        made = np.cumsum(gained, axis=1)
        before, ready = _shifted(after), _shifted(made)
        backward = (kinds == WHOLE) | (kinds == FIRST)
        # a forward ends with more than it began with; a backward is fullest while it runs, or with what its half leaves
        running = np.where(kinds == FORWARD, after + ready, np.where(backward, before + over + ready, 0.0))
        left = np.where((kinds == FIRST) & sizes.split, after + ready, 0.0)
        totals = np.stack([running, left], axis=2).reshape(len(kinds), -1)
        most = np.max(np.where(kinds == FORWARD, after, 0.0), axis=1, initial=0.0)
        fullest = []
        for rank, place in enumerate(np.argmax(totals, axis=1)):
            at, behind = divmod(int(place), 2)
            if totals[rank, place] <= 0.0:
                fullest.append(MemoryPeak())
            elif behind or kinds[rank, at] == FORWARD:
                fullest.append(MemoryPeak(float(after[rank, at]), 0.0, float(ready[rank, at])))
            else:
                fullest.append(
                    MemoryPeak(float(before[rank, at]), float(over[rank, at]), float(ready[rank, at]))
                )
        return tuple(most.tolist()), tuple(fullest)

    def _first(self, split: bool) -> Any:
        """Where the gradients of a stage appear: at the end of its first backward."""
        return self._halved if split else self._whole

    @cached_property
    def _halved(self) -> Any:
        return self._earliest((WHOLE, LATE))

    @cached_property
    def _whole(self) -> Any:
        return self._earliest((WHOLE, FIRST))

    def _earliest(self, kinds: tuple[int, ...]) -> Any:
        found = np.zeros(self._kinds.shape, dtype=bool)
        ends = np.isin(self._kinds, kinds)
        for rank, own in enumerate(self._stages):
            places = np.flatnonzero(ends[rank])
            _, first = np.unique(own[places], return_index=True)
            found[rank, places[first]] = True
        return found


def _shifted(values: Any) -> Any:
    """Before each action what there is behind the one before."""
    found = np.zeros_like(values)
    found[:, 1:] = values[:, :-1]
    return found
