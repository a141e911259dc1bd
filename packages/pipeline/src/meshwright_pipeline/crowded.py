"""How long a step takes on ranks that share cores: who waits leaves its core to the others, who compute faster meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """An action of a rank.

    Attributes:
        place: its number, from 1 on.
        seconds: that it computes for while all ranks do.
        after: the number of the action that it waits for, 0 for none.
        sending: seconds from the end of that one until what it made is here.
    """

    place: int
    seconds: float
    after: int
    sending: float


def elapsed(ranks: Sequence[Sequence[Timed]], company: Sequence[float]) -> tuple[float, list[float]]:
    """Seconds until all have done what they do in their order, and for how many of them each computes.

    Processor sharing: between two events all that compute go on at the same pace, `company[n - 1]` times as long as their
    `seconds` where n of them do.

    Raises:
        ValueError: the actions wait for each other, or take no finite time.
    """
    if not all(math.isfinite(one.seconds) and math.isfinite(one.sending) for own in ranks for one in own):
        raise ValueError("every action, and what it waits for, must take a finite time")
    now, ends = 0.0, {0: 0.0}
    queues = [iter(own) for own in ranks]
    coming = [next(queue, None) for queue in queues]
    left: dict[int, float] = {}  # rank -> what is left of the action that it computes, as if all ranks did
    busy = [0.0] * len(queues)
    while True:
        arrival = math.inf
        for rank, action in enumerate(coming):
            if action is None or rank in left or action.after not in ends:
                continue
            ready = ends[action.after] + action.sending if action.after else now
            if ready <= now:
                left[rank] = action.seconds
            else:
                arrival = min(arrival, ready)
        if not left and arrival == math.inf:
            if any(action is not None for action in coming):
                raise ValueError("the actions wait for each other")
            return now, busy
        pace = company[len(left) - 1] if left else 1.0
        nearest = min(left, key=left.__getitem__) if left else -1
        step = left[nearest] * pace if left else math.inf
        done = step <= arrival - now
        step = step if done else arrival - now
        now = now + step if done else arrival
        for rank in left:
            left[rank] = max(0.0, left[rank] - step / pace)
            busy[rank] += step
        if done:  # those that end at once follow in steps of no length
            action = coming[nearest]
            assert action is not None
            ends[action.place] = now
            coming[nearest] = next(queues[nearest], None)
            del left[nearest]
