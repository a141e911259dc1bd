"""Shard the vocabulary, and only the vocabulary, over the mesh axis "vp".

A kind of axis that meshwright does not bring: no data is divided over it and no block is cut, it takes the large tables
at both ends of a language model off each rank's memory. Three things are said: which degrees, what they cost, and which
parameters are sharded. Every other state follows from the core's rules: the lookup masks its own rows and adds up over
the axis, the logits stay sharded by vocabulary, the loss exchanges three numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import (
    CollectiveUse,
    Link,
    SearchRequest,
    Strategy,
    StrategyCost,
    divisors,
    planned_state,
)

TABLES = (
    "*embed_tokens.weight",
    "*wte.weight",
    "*word_embeddings.weight",
    "*shared.weight",
    "*lm_head.weight",
)
SHARE = 0.3  # of all parameters, about what the tables of a small language model come to


class VocabularyShard(Strategy):
    """Parameters named like a table of the vocabulary are S(0) on "vp"."""

    name: ClassVar[str] = "vocabulary-shard"
    axis: ClassVar[str] = "vp"
    order: ClassVar[int] = 45

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the world size."""
        return divisors(request.world_size)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """Two sums of one hidden state (after the lookup, before the head); the tables divided by the degree."""
        if degree == 1:
            return StrategyCost()
        hidden = max(1, request.sizes.activation_bytes // (8 * request.sizes.layers))
        sums = (
            CollectiveUse("all_reduce", hidden, 1, "forward", "looked-up rows"),
            CollectiveUse("all_reduce", hidden, 1, "backward", "gradient of the last hidden state"),
        )
        left = 1.0 - SHARE + SHARE / degree
        return StrategyCost(
            exposed_seconds=sum(link.seconds(use.kind, use.nbytes, degree) for use in sums),
            parameters=left,
            gradients=left,
            optimizer=left,
            collectives=sums,
        )

    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        """S(0) for a table; a rule of the plan comes first."""
        placed = planned_state(plan, fqn, self.axis)
        if placed == "I" and len(shape) == 2 and any(fnmatchcase(fqn, pattern) for pattern in TABLES):
            return 0
        return placed
