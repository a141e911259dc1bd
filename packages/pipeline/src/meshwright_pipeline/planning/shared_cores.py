"""Step time on ranks that share CPU cores (processor sharing): a rank that waits leaves its core to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedAction:
    """An action of a rank.

    Attributes:
        place: its number, from 1 on.
        seconds: compute time while all ranks compute.
        after: number of the action that it waits for, 0 for none.
        sending: seconds from the end of that action until its message has arrived.
    """

    place: int
    seconds: float
    after: int
    sending: float


def shared_core_time(
    ranks: Sequence[Sequence[TimedAction]], slowdown: Sequence[float]
) -> tuple[float, list[float]]:
    """Seconds until all ranks have run their actions in order, and the seconds for which each rank computes.

    Between two events all computing ranks run at the same pace: while n ranks compute, an action takes
    `slowdown[n - 1]` times its `seconds`.

    Raises:
        ValueError: the actions wait for each other, or a time is not finite.
    """
    if not all(math.isfinite(a.seconds) and math.isfinite(a.sending) for actions in ranks for a in actions):
        raise ValueError("every action, and every message, must take a finite time")
    return _Simulation(ranks, slowdown).run()


class _Simulation:
    def __init__(self, ranks: Sequence[Sequence[TimedAction]], slowdown: Sequence[float]) -> None:
        self.slowdown = slowdown
        self.now = 0.0
        # number of a finished action -> its end
        self.ends = {0: 0.0}
        self.queues = [iter(actions) for actions in ranks]
        self.following = [next(queue, None) for queue in self.queues]
        # computing rank -> seconds left, if all ranks computed
        self.remaining: dict[int, float] = {}
        self.busy = [0.0] * len(ranks)

    def run(self) -> tuple[float, list[float]]:
        while True:
            arrival = self._start_ready()
            if not self.remaining and arrival == math.inf:
                if any(action is not None for action in self.following):
                    raise ValueError("the actions wait for each other")
                return self.now, self.busy
            self._advance(arrival)

    def _start_ready(self) -> float:
        """Start each action whose inputs are there; the time when the next input arrives."""
        arrival = math.inf
        for rank, action in enumerate(self.following):
            if action is None or rank in self.remaining or action.after not in self.ends:
                continue
            ready = self.ends[action.after] + action.sending if action.after else self.now
            if ready <= self.now:
                self.remaining[rank] = action.seconds
            else:
                arrival = min(arrival, ready)
        return arrival

    def _advance(self, arrival: float) -> None:
        """Go on to the next event: an action ends, or a message arrives."""
        pace = self.slowdown[len(self.remaining) - 1] if self.remaining else 1.0
        nearest = min(self.remaining, key=self.remaining.__getitem__) if self.remaining else -1
        step = self.remaining[nearest] * pace if self.remaining else math.inf
        done = step <= arrival - self.now
        if done:
            self.now += step
        else:
            step, self.now = arrival - self.now, arrival
        for rank in self.remaining:
            self.remaining[rank] = max(0.0, self.remaining[rank] - step / pace)
            self.busy[rank] += step
        # other actions that end now follow in steps of length zero
        if done:
            action = self.following[nearest]
            assert action is not None
            self.ends[action.place] = self.now
            self.following[nearest] = next(self.queues[nearest], None)
            del self.remaining[nearest]
