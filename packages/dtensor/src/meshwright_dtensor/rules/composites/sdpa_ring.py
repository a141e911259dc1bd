"""Attention with keys and values sharded over ranks: all-gathered, or passed around a ring.

Both save only the local shards for the backward pass, which communicates keys and values again. So the saved memory
shrinks with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.comm.log import CommLog, Site, record
from meshwright_dtensor.devices.waits import wait_for
from meshwright_dtensor.mesh.mesh import check_sends
from meshwright_dtensor.rules.composites.sdpa_blocks import Merged, Terms, attend, attend_backward, blocks
from meshwright_dtensor.sharding.intervals import Intervals

Tensor = torch.Tensor
Gather = Callable[[Tensor, Site, str], Tensor]
Scatter = Callable[[Tensor, Site], Tensor]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share a sequence.

    Attributes:
        group, axis: their process group, and the name of the mesh axis.
        rank: this rank's place.
        queries: global positions of this rank's queries.
        keys: for every rank the global positions of its keys.
        causal: a query sees keys up to its own position.
        ring: keys are passed around; else ``gather`` collects them, and ``scatter`` reduces their gradients.
        gather: (packed keys and values, site, phase) -> all of them, in order of position.
        scatter: (gradient of what was gathered, site) -> this rank's sum.
    """

    group: dist.ProcessGroup | None
    axis: str
    rank: int
    queries: Intervals
    keys: tuple[Intervals, ...]
    causal: bool
    ring: bool
    gather: Gather
    scatter: Scatter

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.keys)

    def held(self, rank: int) -> int:
        """The number of keys of a rank; they differ if the sequence does not divide."""
        return sum(length for _, length in self.keys[rank % self.size])


class SharedAttention(torch.autograd.Function):
    """q [..., h, l, e], k [..., g, s, e], v [..., g, s, f], all this rank's part -> [..., h, l, f]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        noise: Tensor | None,
        scale: float,
        ranks: Ranks,
        site: Site,
    ) -> Tensor:
        """``mask`` and ``noise``: this rank's queries, all keys."""
        terms = Terms(scale, mask, noise)
        merged = Merged(q, v.shape[-1])
        for positions, kv in _sources(ranks, torch.cat([k, v], -1), site, "forward"):
            keys, values = kv.split([k.shape[-1], v.shape[-1]], -1)
            attend(q, keys, values, blocks(ranks.queries, positions, ranks.causal), terms, merged)
        out = merged.out.to(q.dtype)
        # with dropout one device lets its result be modified in place; the noise is larger than this copy
        kept = out if noise is None else out.clone()
        ctx.save_for_backward(q, k, v, mask, noise, kept, merged.lse)
        ctx.scale, ctx.ranks, ctx.site = scale, ranks, site
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Keys are communicated again; their gradients are sent to their owners."""
        q, k, v, mask, noise, out, lse = ctx.saved_tensors
        ranks, site = ctx.ranks, ctx.site
        terms = Terms(ctx.scale, mask, noise)
        wide = lse.dtype
        dq = torch.zeros_like(q, dtype=wide)
        dmask = torch.zeros_like(mask, dtype=wide) if ctx.needs_input_grad[3] else None
        widths = [k.shape[-1], v.shape[-1]]
        source = ranks.rank
        # waits for the sum of the gradients of the keys of ``source``
        summed: Callable[[], Tensor] | None = None
        for positions, kv in _sources(ranks, torch.cat([k, v], -1), site, "backward"):
            keys, values = kv.split(widths, -1)
            dkv = torch.zeros_like(kv, dtype=wide)
            dk, dv = dkv.split(widths, -1)
            parts = blocks(ranks.queries, positions, ranks.causal)
            attend_backward(gradient, q, keys, values, out, lse, parts, terms, (dq, dk, dv), dmask)
            if ranks.ring:
                # the sum of earlier ranks is passed on with the keys
                dkv, source = dkv if summed is None else dkv.add_(summed()), source - 1
                why = "gradients of keys and values to the next rank"
                summed = _shift(ranks, dkv, source, site, "backward", why)
            else:
                summed = partial(ranks.scatter, dkv, site)
        assert summed is not None
        dk, dv = summed().split(widths, -1)
        grads = (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
        return *grads, None if dmask is None else dmask.to(mask.dtype), None, None, None, None


def _sources(ranks: Ranks, local: Tensor, site: Site, phase: str) -> Iterator[tuple[Intervals, Tensor]]:
    """(positions, keys and values) of each rank; the next is received while one is used."""
    if not ranks.ring:
        end = max(start + length for part in ranks.keys for start, length in part)
        yield ((0, end),), ranks.gather(local, site, phase)
        return
    here = local.contiguous()
    for step in range(ranks.size):
        source = (ranks.rank - step) % ranks.size
        last = step == ranks.size - 1
        why = "keys and values to the next rank"
        coming = None if last else _shift(ranks, here, source - 1, site, phase, why)
        yield ranks.keys[source], here
        if coming is not None:
            here = coming()


def _shift(ranks: Ranks, sent: Tensor, source: int, site: Site, phase: str, why: str) -> Callable[[], Tensor]:
    """Start to send ``sent`` to the next rank of the ring; the result waits for the keys of ``source`` from the previous one."""
    received = sent.new_empty((*sent.shape[:-2], ranks.held(source), sent.shape[-1]))
    group = ranks.group
    assert group is not None
    check_sends(group, sent.device, "attention in a ring (cp)")
    after, before = (dist.get_global_rank(group, (ranks.rank + d) % ranks.size) for d in (1, -1))
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
    )
    if CommLog.listening():
        record("send_recv", ranks.axis, sent.nbytes, phase, site.module, site.function, why)

    def wait() -> Tensor:
        for request in work:
            wait_for(request)
        # keeps the tensor alive until it is sent
        assert sent is not received
        return received

    return wait
