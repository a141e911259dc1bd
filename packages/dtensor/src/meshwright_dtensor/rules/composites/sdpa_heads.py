"""All-to-alls between parts of the sequence with all heads, and whole sequences with a part of the heads (DeepSpeed-Ulysses).

One exchange moves all tensors of a call: its messages are written from where the tensors are, and what arrives is written where
it belongs, in order of position. So zig-zag and plain chunks cost no copies of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_dtensor.comm import group_calls
from meshwright_dtensor.comm.collectives import refuse_tangent
from meshwright_dtensor.comm.log import CommLog, Site, record
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.sharding.boxes import dense_strides
from meshwright_dtensor.sharding.intervals import Intervals

Tensor = torch.Tensor
Held = tuple[Intervals, ...]
"""For every rank the positions that it holds, in its order; equally many on all ranks."""


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The exchanges over mesh axis `axis`, of tensors [..., heads, tokens, features] whose numbers of heads its size divides."""

    context: MeshContext
    axis: int

    def whole_sequences(
        self, tensors: Sequence[Tensor], held: Sequence[Held], site: Site
    ) -> tuple[Tensor, ...]:
        """This rank's part of the heads of each tensor, from the ranks' parts of the sequence; with autograd.

        `held`: of each tensor, before the exchange. Tensors of several dtypes, which autocast leaves, take an exchange each.
        """
        if len({t.dtype for t in tensors}) > 1:
            pairs = zip(tensors, held, strict=True)
            return tuple(self.whole_sequences((t,), (positions,), site)[0] for t, positions in pairs)
        for t in tensors:
            refuse_tangent(t)
        return _Exchange.apply(self, True, tuple(held), site, *tensors)  # type: ignore[no-any-return]

    def parts(self, tensors: Sequence[Tensor], held: Sequence[Held], site: Site) -> tuple[Tensor, ...]:
        """The reverse: this rank's part of the sequence with all heads; tensors of one dtype. `held`: after the exchange."""
        return _Exchange.apply(self, False, tuple(held), site, *tensors)  # type: ignore[no-any-return]

    def run(
        self, tensors: Sequence[Tensor], held: Sequence[Held], to_heads: bool, site: Site, phase: str
    ) -> tuple[Tensor, ...]:
        """Exchange once, without autograd. In memory tokens are outside of heads, as torch's kernels have them.

        The results are no views: those of a custom Function cannot be modified in place.
        """
        n, name = self.context.sizes[self.axis], self.context.axes[self.axis]
        total = sum(t.numel() for t in tensors)
        self.context.calls.follow(f"all_to_all over {name}, heads of attention")
        if CommLog.listening():
            why = "heads in place of the sequence" if to_heads else "the sequence in place of heads"
            nbytes = total * tensors[0].element_size() * n
            record("all_to_all", name, nbytes, phase, site.module, site.function, why)
        swapped = [t.transpose(-3, -2) for t in tensors]
        message = tensors[0].new_empty(total)
        for piece, sent in self._in_message(swapped, held, to_heads, message):
            sent.copy_(piece)
        counts = [total // n] * n
        arrived = group_calls.all_to_all(message, counts, counts, self.context.group(self.axis))
        results = tuple(_empty(t, n, to_heads) for t in tensors)
        swapped = [t.transpose(-3, -2) for t in results]
        for piece, received in self._in_message(swapped, held, not to_heads, arrived):
            piece.copy_(received)
        return results

    def _in_message(
        self, tensors: Sequence[Tensor], held: Sequence[Held], by_heads: bool, message: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces of [..., tokens, heads, features], and their places in a message: rank by rank, of every tensor."""
        n, rank, at = self.context.sizes[self.axis], self.context.coords[self.axis], 0
        pairs = zip(tensors, held, strict=True)
        cut = [_by_heads(t, h[rank], n) if by_heads else _by_positions(t, h) for t, h in pairs]
        for of_rank in zip(*cut, strict=True):
            for piece in itertools.chain.from_iterable(of_rank):
                yield piece, message[at : at + piece.numel()].view(piece.shape)
                at += piece.numel()


def _empty(t: Tensor, n: int, to_heads: bool) -> Tensor:
    """For the result of [..., heads, tokens, features]."""
    *batch, heads, tokens, features = t.shape
    changed = (heads // n, tokens * n) if to_heads else (heads * n, tokens // n)
    shape = (*batch, *changed, features)
    *outer, of_heads, of_tokens, last = range(len(shape))
    return t.new_empty_strided(shape, dense_strides(shape, (*outer, of_tokens, of_heads, last)))


def _by_heads(t: Tensor, mine: Intervals, n: int) -> Iterator[list[Tensor]]:
    """Of a part of the sequence [..., tokens, heads, features]: views of the heads of each rank, an interval at a time."""
    for heads in t.chunk(n, -2):
        yield list(heads.split([length for _, length in mine], -3))


def _by_positions(t: Tensor, held: Held) -> Iterator[list[Tensor]]:
    """Of a whole sequence [..., tokens, heads, features]: views of the positions of each rank."""
    for positions in held:
        yield [t.narrow(-3, start, length) for start, length in positions]


class _Exchange(torch.autograd.Function):
    """An exchange, and its reverse for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, to_heads: bool, held: tuple[Held, ...], site: Site, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The tensors after the exchange."""
        ctx.exchange, ctx.to_heads, ctx.held, ctx.site = exchange, to_heads, held, site
        return exchange.run(tensors, held, to_heads, site, "forward")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradients of the parts that were sent."""
        sent = ctx.exchange.run(gradients, ctx.held, not ctx.to_heads, ctx.site, "backward")
        return None, None, None, None, *sent
