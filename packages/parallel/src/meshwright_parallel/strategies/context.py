"""Context parallelism: the sequence of the batch is sharded along the axis `cp`, through the whole unmodified model.

Embeddings, norms and feed-forward layers compute on a rank's own tokens. Attention communicates, in one of three forms (see
`meshwright_dtensor.mesh.context`): keys and values are all-gathered, or passed around a ring, or an all-to-all
shards heads in place of the sequence. Parameters are replicated, and the reduction engine sums their gradients.

Sources: ring attention (Liu et al., 2023); all-to-all (DeepSpeed-Ulysses, Jacobs et al., 2023); two chunks per rank, one
from each end, for equal work under a causal mask (striped and zig-zag attention; Llama 3, 2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.intervals import zigzag_shard
from meshwright_dtensor.strategy import CollectiveUse, Stall, Strategy, StrategyCost, divisors

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright_dtensor.model.batch_size import BatchSize
    from meshwright_dtensor.plan import ParallelPlan
    from meshwright_dtensor.sharding.states import State
    from meshwright_dtensor.strategy import AttentionUse, GradientKind, Link, SearchRequest

LEAST_TOKENS = 2048
"""Least tokens per rank of the degrees that the search tries without a pin."""

FORMS = ("all_gather", "all_to_all", "ring")


class Context(Strategy):
    """Batch tensors whose dim 1 is the sequence are sharded on it. Parameters have partial gradients."""

    name: ClassVar[str] = "context"
    axis: ClassVar[str] = "cp"
    order: ClassVar[int] = 20
    gradient: ClassVar[GradientKind] = "deferred"

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the world size that divide the sequence; without a pin, only those that leave each rank many tokens."""
        length = request.sequence_length
        if length is None:
            return [1]
        least = 1 if request.pins.get(self.axis) or request.exhaustive else LEAST_TOKENS
        chunks = 2 if request.options.get("context_balance") == "zigzag" else 1
        candidates = divisors(request.world_size)
        return [d for d in candidates if d == 1 or (length % (chunks * d) == 0 and length // d >= least)]

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """The cost of the cheapest form of attention, or of the pinned one.

        The planner's tape has attention of a rank's own chunk only. The rest of the work, `degree` - 1 times as much, is added
        here, for the rank that has most of it.

        Raises UsageError: the pinned form needs a number of heads that the degree divides.
        """
        if degree <= 1:
            return StrategyCost()
        pinned = request.options.get("context_attention")
        if pinned is not None and not _possible(pinned, request, degree):
            heads = next(use.heads for use in request.sizes.attention if use.heads % degree)
            raise UsageError(
                f"context_attention={pinned!r}: attention over {heads} heads (a rank's, as other axes leave them) cannot be "
                f"spread over cp={degree}; pin cp to a divisor of {heads}, or use 'ring' or 'all_gather'"
            )
        forms = FORMS if pinned is None else (pinned,)
        possible = (form for form in forms if _possible(form, request, degree))
        costs = [
            self._cost_of(form, self._balance(request, degree, form), request, degree, link)
            for form in possible
        ]
        return min(costs, key=lambda cost: cost.exposed_seconds)

    @staticmethod
    def _balance(request: SearchRequest, degree: int, form: str) -> str:
        """Zig-zag where causal attention gives the ranks different work otherwise: whole sequences of some heads are equal work."""
        pinned: str | None = request.options.get("context_balance")
        causal = any(use.causal for use in request.sizes.attention)
        fits = request.sequence_length is not None and request.sequence_length % (2 * degree) == 0
        return pinned or ("zigzag" if causal and fits and form != "all_to_all" else "none")

    @staticmethod
    def _cost_of(form: str, balance: str, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        exposed, hidden, slack, times = 0.0, 0.0, 0.0, request.step.microbatches
        collectives: list[CollectiveUse] = []
        for use in request.sizes.attention:
            uneven = use.causal and balance == "none" and form != "all_to_all"
            # chunk r attends to r whole chunks and half of itself: the last rank has most work
            compute = use.seconds * (2.0 * degree - 1.0 if uneven else float(degree))
            call = _collectives(form, use, degree)
            seconds = sum(c.count * link.seconds(c.kind, c.nbytes, degree) for c in call)
            # on the host, sends take the cores that attention needs
            overlaps = form == "ring" and request.step.accelerated
            left = max(0.0, seconds - compute * (degree - 1) / degree) if overlaps else seconds
            exposed += use.count * (left + compute - use.seconds)
            hidden += use.count * (seconds - left)
            slack += use.count * min(left, request.step.interference * (seconds - left))
            collectives += [replace(c, count=c.count * use.count) for c in call]
        return StrategyCost(
            exposed_seconds=exposed,
            stall=Stall(exposed / times, hidden / times, times),
            overlapped_seconds=hidden,
            slack_seconds=slack,
            collectives=tuple(collectives),
            fields={"context": {"attention": form, "balance": balance}},
        )

    def batch_state(
        self, name: str, shape: Sequence[int], size: BatchSize, degree: int, plan: ParallelPlan | None = None
    ) -> State:
        """S(1), in chunks or zig-zag, where dim 1 is the sequence; else replicated.

        Raises UsageError: the batch has no sequence, or one that the degree does not divide.
        """
        length = size.tokens
        if len(shape) < 2:
            return "I"
        if length is None:
            raise UsageError(
                f"cp={degree} needs a batch with a sequence: ids [rows, tokens] or embeddings [rows, tokens, features]. This batch "
                f"has no sequence, and batch tensor {name!r} has shape {tuple(shape)}; leave cp out"
            )
        if shape[1] != length:
            return "I"
        is_zigzag = plan is not None and plan.context is not None and plan.context.balance == "zigzag"
        multiple = degree * (2 if is_zigzag else 1)
        if length % multiple:
            how = f"two chunks for each of {degree} ranks (zigzag)" if is_zigzag else f"{degree} equal chunks"
            nearest = max(multiple, round(length / multiple) * multiple)
            raise UsageError(
                f"batch tensor {name!r} has a sequence of {length} tokens (dim 1), which cp={degree} divides into {how}: "
                f"the length must be a multiple of {multiple}, such as {nearest}; pad the batch to it"
            )
        return zigzag_shard(1, length, degree) if is_zigzag else 1

    def attach(self, model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Tell the core which form of attention this axis uses."""
        from meshwright_dtensor.mesh.context import share_attention

        share_attention(mesh, self.axis, "all_gather" if plan.context is None else plan.context.attention)


def _possible(form: str, request: SearchRequest, degree: int) -> bool:
    return form != "all_to_all" or all(use.heads % degree == 0 for use in request.sizes.attention)


def _collectives(form: str, use: AttentionUse, degree: int) -> list[CollectiveUse]:
    """The collectives of one attention call, forward and backward."""
    kv = use.key_value_bytes
    if form == "ring":
        what = "keys and values to the next rank"
        return [
            CollectiveUse("send_recv", kv, degree - 1, "forward", what),
            CollectiveUse("send_recv", kv, degree - 1, "backward", what),
            CollectiveUse("send_recv", kv, degree, "backward", f"gradients of {what}"),
        ]
    if form == "all_gather":
        return [
            CollectiveUse("all_gather", kv * degree, 1, "forward", "keys and values"),
            CollectiveUse("all_gather", kv * degree, 1, "backward", "keys and values, again"),
            CollectiveUse("reduce_scatter", kv * degree, 1, "backward", "gradients of keys and values"),
        ]
    # key heads are repeated so that each rank has equally many
    repeats = degree // math.gcd(use.key_heads, degree)
    if use.heads % (use.key_heads * repeats):
        repeats = use.heads // use.key_heads
    sizes = Counter((use.query_bytes + kv * repeats, use.output_bytes))
    return [
        CollectiveUse("all_to_all", nbytes * degree, count, phase, "heads in place of the sequence")
        for phase in ("forward", "backward")
        for nbytes, count in sizes.items()
    ]
