"""Batch normalisation of rows that ranks share: gradients, gradients of gradients, ranks without rows, low precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_composites import last_node
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.rules import LocalContext, RuleBook
from meshwright_dtensor.sharding.boxes import slice_of
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool

CHANNELS = 3


def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Without running statistics."""
    return F.batch_norm(x, None, None, weight, bias, True)


def results(call: Any, tensors: list[torch.Tensor], frozen: int | None, twice: bool) -> list[torch.Tensor]:
    """The result, and the gradients of x, weight and bias; if `twice`, of a loss that has gradients of x in it too."""
    leaves = [t.detach().clone().requires_grad_(k != frozen) for k, t in enumerate(tensors)]
    result = call(leaves)
    loss = result.tanh().sum()
    if twice:
        (gradient,) = torch.autograd.grad(loss, leaves[:1], create_graph=True)
        loss = loss + (gradient * gradient).sum()
    loss.backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def both(
    rank: int, size: int, rows: int, dtype: torch.dtype, frozen: int | None, twice: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each on this rank, and its part of one device's; of weight and bias, this rank's share of the sum and the sum."""
    generator = seeded(0)
    x = torch.randn(rows, CHANNELS, 4, 5, generator=generator).contiguous(memory_format=torch.channels_last)
    # of both precisions the same values
    rounded = [x.bfloat16(), *torch.randn(2, CHANNELS, generator=generator).bfloat16()]
    whole = [value.to(dtype) for value in rounded]
    book = RuleBook.first_party()
    node, values = last_node(normalise, whole, book)
    shapes = tuple(values[r.i].shape for r in node.ins), tuple(values[r.i].shape for r in node.outs)
    states = ((0,), *(("R",) for _ in node.ins[1:]))
    ctx = LocalContext(init_device_mesh(device_type(), (size,)), node, states, ((0,),), *shapes)
    box = ctx.box(tuple(x.shape), (0,))
    here = results(book.composite(node.name).local(ctx), [slice_of(whole[0], box), *whole[1:]], frozen, twice)
    alone = results(lambda leaves: normalise(*leaves), whole, frozen, twice)
    of_rows = 1 if frozen == 0 else 2
    return [*zip(here[:of_rows], (slice_of(t, box) for t in alone), strict=False)] + [
        *zip(here[of_rows:], alone[of_rows:], strict=True)
    ]


@pytest.mark.parametrize("rows", [4, 3, 1])
@pytest.mark.parametrize(("frozen", "twice"), [(None, False), (None, True), (0, False), (1, True)])
def test_gradients_are_those_of_one_device(
    rank_pool: RankPool, rows: int, frozen: int | None, twice: bool
) -> None:
    outcomes = rank_pool.run(2, both, rows, torch.float64, frozen, twice)
    of_rows = 1 if frozen == 0 else 2
    for k, pairs in enumerate(zip(*outcomes, strict=True)):
        if k < of_rows:
            for here, alone in pairs:
                torch.testing.assert_close(here, alone)
        else:
            torch.testing.assert_close(sum(here for here, _ in pairs), pairs[0][1])


def test_low_precision_is_as_near_as_one_device(rank_pool: RankPool) -> None:
    exact = rank_pool.run(2, both, 4, torch.float64, None, False)
    rounded = rank_pool.run(2, both, 4, torch.bfloat16, None, False)
    for pairs, low in zip(exact, rounded, strict=True):
        for (_, value), (here, alone) in zip(pairs[:2], low[:2], strict=True):
            assert here.dtype == torch.bfloat16 and here.stride() == alone.stride()
            assert (here - value).abs().max() <= 1.1 * (alone - value).abs().max()
