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
    now, busy = 0.0, [0.0] * len(ranks)
    # number of a finished action -> its end
    ends = {0: 0.0}
    queues = [iter(actions) for actions in ranks]
    following = [next(queue, None) for queue in queues]
    # computing rank -> seconds left, if all ranks computed
    remaining: dict[int, float] = {}
    while True:
        # start each action whose inputs are there, and find when the next input arrives
        arrival = math.inf
        for rank, action in enumerate(following):
            if action is None or rank in remaining or action.after not in ends:
                continue
            ready = ends[action.after] + action.sending if action.after else now
            if ready <= now:
                remaining[rank] = action.seconds
            else:
                arrival = min(arrival, ready)
        if not remaining and arrival == math.inf:
            if any(following):
                raise ValueError("the actions wait for each other")
            return now, busy
        # go on to the next event: an action ends, or a message arrives
        pace = slowdown[len(remaining) - 1]
        nearest = min(remaining, key=remaining.__getitem__, default=-1)
        length = remaining.get(nearest, math.inf) * pace
        step = min(length, arrival - now)
        for rank in remaining:
            remaining[rank] = max(0.0, remaining[rank] - step / pace)
            busy[rank] += step
        if length > step:
            now = arrival
            continue
        # other actions that end now follow in steps of length zero
        now += step
        action = following[nearest]
        assert action is not None
        ends[action.place], following[nearest] = now, next(queues[nearest], None)
        del remaining[nearest]
