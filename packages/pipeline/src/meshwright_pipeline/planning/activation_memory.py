"""Activation memory of the ranks of a pipeline, action by action, vectorised over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = "FBIW"
FORWARD, WHOLE, FIRST, LATE = range(len(KINDS))


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes of a rank at its memory peak: kept for backwards, alive in addition, and gradients."""

    kept: float = 0.0
    over: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        """The sum."""
        return self.kept + self.over + self.gradients


class RankActions:
    """The actions of each rank in its own order, as numbers: kind (index in KINDS) x stages + stage."""

    def __init__(self, ranks: Sequence[Sequence[int]], stages: int) -> None:
        longest = max(1, *map(len, ranks))
        padding = len(KINDS) * stages
        numbers = np.array([[*row, *[padding] * (longest - len(row))] for row in ranks], dtype=np.int64)
        self._kinds, self._stages = np.divmod(numbers, stages)
        self._first_backwards: dict[bool, Any] = {}

    def held(
        self,
        saved: Sequence[float],
        over: Sequence[float],
        deferred_bytes: Sequence[float],
        gradients: Sequence[float],
        split: bool,
        first: Sequence[float],
    ) -> tuple[tuple[float, ...], tuple[MemoryPeak, ...]]:
        """For each rank, the largest bytes of activations held at once, and its memory peak.

        The arguments are bytes of a microbatch on each stage, and `split`; see StageCosts.
        """
        kinds = self._kinds
        kept, alive, waiting, sums, in_first = (
            np.asarray(values, dtype=float)[self._stages]
            for values in (saved, over, deferred_bytes, gradients, first)
        )
        zero = np.zeros_like(kept)
        if split:
            alive = np.where(kinds == FIRST, in_first, alive)
            change = np.choose(kinds, (kept, -kept, waiting, -(kept + waiting), zero))
        else:
            # the first half does all of it
            change = np.choose(kinds, (kept, -kept, -kept, zero, zero))
        after, gained = np.cumsum(change, axis=1), np.where(self._ends(split), sums, zero)
        before, ready = _shifted(after), _shifted(np.cumsum(gained, axis=1))
        backward = (kinds == WHOLE) | (kinds == FIRST)
        # a forward peaks at its end; a backward while it runs, or after its first half with the bytes that wait
        running = np.where(kinds == FORWARD, after + ready, np.where(backward, before + alive + ready, 0.0))
        left = np.where((kinds == FIRST) & split, after + ready, 0.0)
        totals = np.stack([running, left], axis=2).reshape(len(kinds), -1)
        most = np.max(np.where(kinds == FORWARD, after, 0.0), axis=1, initial=0.0)
        fullest = []
        for rank, place in enumerate(np.argmax(totals, axis=1)):
            at, at_end = divmod(int(place), 2)
            held, working = before[rank, at], alive[rank, at]
            if at_end or kinds[rank, at] == FORWARD:
                held, working = after[rank, at], 0.0
            peak = MemoryPeak(float(held), float(working), float(ready[rank, at]))
            fullest.append(peak if totals[rank, place] > 0.0 else MemoryPeak())
        return tuple(most.tolist()), tuple(fullest)

    def _ends(self, split: bool) -> Any:
        """The actions after which the gradients of a stage exist, the ends of its first backwards; cached."""
        if split not in self._first_backwards:
            earliest = np.zeros(self._kinds.shape, dtype=bool)
            ends = np.isin(self._kinds, (WHOLE, LATE if split else FIRST))
            for rank, stages in enumerate(self._stages):
                places = np.flatnonzero(ends[rank])
                _, first = np.unique(stages[places], return_index=True)
                earliest[rank, places[first]] = True
            self._first_backwards[split] = earliest
        return self._first_backwards[split]


def _shifted(values: Any) -> Any:
    """The value after the previous action, 0 before the first."""
    shifted = np.zeros_like(values)
    shifted[:, 1:] = values[:, :-1]
    return shifted
