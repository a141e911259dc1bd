"""Shard tensor dim 1 of the batch, the sequence, over the mesh axis "sq".

Only two things are said: how the batch enters, and what it costs. Parameters stay replicated with complete gradients
(the default), and every other state follows from the core's rules: attention gathers its keys and values, position
tables are sliced, the loss is a sum over the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from meshwright_dtensor.states import State
from meshwright_dtensor.strategy import CollectiveUse, Link, SearchRequest, Strategy, StrategyCost, divisors

GATHERS_PER_LAYER = 2  # keys and values


class SequenceShard(Strategy):
    """Batch inputs of at least two dims are S(1) on "sq"."""

    name: ClassVar[str] = "sequence-shard"
    axis: ClassVar[str] = "sq"
    order: ClassVar[int] = 20

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the world size that divide the sequence; 1 where the batch has none."""
        length = request.sequence_length
        return [1] if length is None else [d for d in divisors(request.world_size) if length % d == 0]

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """Gathers of keys and values in each layer, one sum of all gradients; activations divided by the degree."""
        if degree == 1:
            return StrategyCost()
        per_layer = max(1, request.activation_bytes // (8 * request.layers))
        gathers = CollectiveUse(
            "all_gather", per_layer, GATHERS_PER_LAYER * request.layers, "forward", "keys and values"
        )
        sums = CollectiveUse(
            "all_reduce", request.gradient_bytes, 1, "backward", "gradients of replicated parameters"
        )
        exposed = sum(use.count * link.seconds(use.kind, use.nbytes, degree) for use in (gathers, sums))
        return StrategyCost(exposed_seconds=exposed, activations=1.0 / degree, collectives=(gathers, sums))

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """S(1) for (rows, tokens, ...) whose tokens divide, else replicated."""
        return 1 if len(shape) >= 2 and shape[1] % degree == 0 else "I"
