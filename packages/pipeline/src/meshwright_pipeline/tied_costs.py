"""What it takes to sum the gradients of parameters that several ranks of a pipeline hold (see tied.TiedSum)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from meshwright_dtensor.strategy.cost import TIED
from meshwright_dtensor.strategy.strategy import CollectiveUse, Link, SearchRequest
from meshwright_pipeline.surveying import Surveyed

AGREEING_CALLS = 400
"""What it costs the host that all agree that it went well, in operations: a message that goes and one that comes."""


def tied_sums(
    held: Sequence[frozenset[str]], known: Surveyed, request: SearchRequest, link: Link
) -> tuple[float, tuple[CollectiveUse, ...]]:
    """Seconds behind all backwards, and messages.

    Two ranks exchange what both hold; of more the first adds up and tells the others. All agree that it went well. Where sums
    over the ranks of a stage, more than two, may differ in their order, the first tells the others again.

    `held`: by rank, first names of the parameters that it holds.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(held):
        for name in names & known.trained:
            holders[name].append(rank)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(name for name, ranks in holders.items() if len(ranks) > 1):
        groups[tuple(holders[name])].append(name)
    if not groups:
        return 0.0, ()
    count = len(held)
    unlike = request.world_size // count > 2
    waits = [0.0] * count
    uses = []
    for ranks, tied in groups.items():
        nbytes, others = math.ceil(known.share(frozenset(tied)) * request.gradient_bytes), len(ranks) - 1
        times = (1 if others == 1 else 2 * others) + others * unlike
        for rank in ranks:
            waits[rank] += times * link.seconds("send_recv", nbytes, count)
        uses.append(CollectiveUse("send_recv", nbytes, times, "backward", TIED))
    return max(waits) + (1 + unlike) * AGREEING_CALLS * request.call_seconds, tuple(uses)
