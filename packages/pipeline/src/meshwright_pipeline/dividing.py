"""Where to cut a sequence of costs into runs."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """Where to cut a sequence into `count` runs whose largest sum is smallest: `count` - 1 ascending places.

    Dynamic programming over prefixes, exact; of equal answers the one with the earliest cuts. No run is empty.

    Raises:
        ValueError: fewer elements than runs.
    """
    total = len(costs)
    if total < count:
        raise ValueError(f"{total} elements cannot be cut into {count} runs that are not empty")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[i]: smallest largest sum of the first i elements in the runs so far, and where the last of these begins
    best = [prefix[i] for i in range(total + 1)]
    starts: list[list[int]] = []
    for runs in range(2, count + 1):
        new, where = [float("inf")] * (total + 1), [0] * (total + 1)
        for end in range(runs, total + 1):
            for begin in range(end - 1, runs - 2, -1):
                last = prefix[end] - prefix[begin]
                if last > new[end]:
                    break  # it only grows
                value = max(best[begin], last)
                if value <= new[end]:
                    new[end], where[end] = value, begin
        best = new
        starts.append(where)
    cuts: list[int] = []
    end = total
    for where in reversed(starts):
        end = where[end]
        cuts.append(end)
    return cuts[::-1]
