"""A stream for each shard: independent numbers, the same again and on all copies of a shard, and not those of one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from meshwright_dtensor.random import Part, draw_part, run_random
from meshwright_dtensor.sharding.boxes import Place, chunk_box, copy_region, place_shape, whole_box
from meshwright_dtensor.testing.on_device import device_type, random_state

aten = torch.ops.aten
SHAPE, SHARDS = (64, 1024), 8
NUMEL = 64 * 1024 // SHARDS
NORMAL = aten.normal_.default


def drawn(place: Place, op: Any = NORMAL, *rest: Any, times: int = 1) -> list[torch.Tensor]:
    """What `times` draws give for a part, from the seed on."""
    torch.manual_seed(3)
    part = Part(SHAPE, (0, 1), place)
    return [
        run_random(op, (torch.zeros(place_shape(place)), *rest), {}, [part], per_shard=True).clone()
        for _ in range(times)
    ]


def boxes(dim: int) -> list[Place]:
    return [chunk_box(SHAPE, (SHARDS,), (rank,), (dim,)) for rank in range(SHARDS)]


@pytest.mark.parametrize("dim", [0, 1])
def test_means_and_correlations(dim: int) -> None:
    """Between shards, and between draws of a shard: at most five standard errors, of 120 pairs."""
    samples = torch.stack([t.flatten() for box in boxes(dim) for t in drawn(box, times=2)]).double()
    error = NUMEL**-0.5
    assert samples.mean(1).abs().max() < 5 * error
    assert (samples.std(1) - 1).abs().max() < 5 * error
    correlations = torch.corrcoef(samples) - torch.eye(2 * SHARDS)
    assert correlations.abs().max() < 5 * error
    # shifted against each other, as streams of one generator that overlap would be
    shifted = torch.corrcoef(torch.cat([samples[:, :-1], samples[:, 1:]]))[2 * SHARDS :, : 2 * SHARDS]
    assert shifted.abs().max() < 5 * error
    kept = torch.stack([drawn(box, aten.bernoulli_.float, 0.3)[0] for box in boxes(dim)]).flatten(1)
    assert (kept.mean(1) - 0.3).abs().max() < 5 * (0.21 / NUMEL) ** 0.5
    assert (torch.corrcoef(kept) - torch.eye(SHARDS)).abs().max() < 5 * error


def test_one_stream_for_all_shards_would_be_seen() -> None:
    """The negative control of the correlations: every rank draws its part from the seed alone."""
    torch.manual_seed(3)
    alike = torch.stack([torch.manual_seed(3) and torch.randn(NUMEL) for _ in range(2)])
    assert torch.corrcoef(alike)[0, 1] > 0.99


def test_copies_and_the_same_layout_again() -> None:
    for box in (*boxes(0), whole_box(SHAPE), (((0, 4), (9, 2)), ((3, 30),))):
        first, second = drawn(box, times=2)
        assert not torch.equal(first, second)
        assert all(torch.equal(a, b) for a, b in zip(drawn(box, times=2), (first, second), strict=True))
    as_region = tuple((interval,) for interval in boxes(0)[3])
    assert torch.equal(drawn(as_region)[0], drawn(boxes(0)[3])[0])


def test_generators_stay_equal_whatever_a_rank_holds() -> None:
    ends = []
    for box in (boxes(0)[0], boxes(1)[5], whole_box(SHAPE), ((64, 0), (0, 1024))):
        drawn(box, times=2)
        ends.append(random_state())
    assert all(torch.equal(ends[0], end) for end in ends[1:])
    torch.manual_seed(3)
    assert not torch.equal(ends[0], random_state())


def test_not_the_numbers_of_one_device() -> None:
    """The negative control: nor those of another layout."""
    torch.manual_seed(3)
    whole = torch.empty(SHAPE).normal_()
    for box in boxes(0):
        assert not torch.isin(drawn(box)[0][:, :8], whole).any()
    rows, half = drawn(boxes(0)[0])[0], drawn(((0, 4), (0, 1024)))[0]
    assert not torch.equal(rows[:4], half)


FUNCTIONS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.rand_like.default, ()),
    (aten.randint_like.default, (1000,)),
    (aten.bernoulli.default, ()),
    (aten.bernoulli_.Tensor, (torch.full((64, 1), 0.5),)),
    (aten.native_dropout.default, (0.4, True)),
    (aten.normal.Tensor_float, (0.5,)),
]


@pytest.mark.parametrize(("op", "rest"), FUNCTIONS, ids=str)
def test_other_operations(op: Any, rest: tuple[Any, ...]) -> None:
    results, ends = [], []
    for box, _ in itertools.product(boxes(1)[:2], range(2)):
        torch.manual_seed(3)
        parts = [Part(SHAPE, (0, 1), box), Part((64, 1), (0, 1), ((0, 64), (0, 1)))]
        local = torch.full(place_shape(box), 0.5)
        given = parts if rest and isinstance(rest[0], torch.Tensor) else parts[:1]
        result = run_random(op, (local, *rest), {}, given, per_shard=True)
        results.append(result[1] if isinstance(result, tuple) else result)
        ends.append(random_state())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert not torch.equal(results[0], results[2])
    assert all(torch.equal(ends[0], end) for end in ends)


def test_a_rank_draws_its_part_alone() -> None:
    """The negative control is the exact way, which draws all."""
    box, counts = boxes(0)[2], []

    def draw(tensor: torch.Tensor) -> None:
        counts.append(tensor.numel())
        tensor.normal_()

    for per_shard in (True, False):
        got = draw_part(draw, SHAPE, (0, 1), torch.float32, device_type(), box, per_shard=per_shard)
        assert got.shape == copy_region(torch.empty(SHAPE), box).shape
    assert counts == [NUMEL, SHARDS * NUMEL]
