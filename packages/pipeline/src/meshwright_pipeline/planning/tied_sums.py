"""Cost of summing the gradients of parameters that several ranks of a pipeline hold (see runtime.tied_grads)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from meshwright_dtensor.strategy import CollectiveUse, Link, SearchRequest
from meshwright_dtensor.strategy.cost import TIED
from meshwright_pipeline.planning.survey import ModelSurvey

AGREEING_CALLS = 400
"""Host cost of the final agreement of the ranks, in operations: one message in each direction."""


def tied_sums(
    held: Sequence[frozenset[str]], survey: ModelSurvey, request: SearchRequest, link: Link
) -> tuple[float, tuple[CollectiveUse, ...]]:
    """Seconds after all backwards, and messages.

    Two ranks exchange their gradients. With more, the first rank sums them and sends the result back. Then all ranks
    agree on success. If more than two ranks of a stage reduce, their sums may differ in order, and the first sends its own.

    `held`: for each rank, first names of the parameters that it holds.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(held):
        for name in names & survey.trained:
            holders[name].append(rank)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(name for name, ranks in holders.items() if len(ranks) > 1):
        groups[tuple(holders[name])].append(name)
    if not groups:
        return 0.0, ()
    count = len(held)
    sends_sum = request.world_size // count > 2
    seconds = [0.0] * count
    uses = []
    for ranks, tied in groups.items():
        nbytes, others = (
            math.ceil(survey.share(frozenset(tied)) * request.sizes.gradient_bytes),
            len(ranks) - 1,
        )
        times = (1 if others == 1 else 2 * others) + others * sends_sum
        for rank in ranks:
            seconds[rank] += times * link.seconds("send_recv", nbytes, count)
        uses.append(CollectiveUse("send_recv", nbytes, times, "backward", TIED))
    return max(seconds) + (1 + sends_sum) * AGREEING_CALLS * request.step.call_seconds, tuple(uses)
