"""Gradient sums of parameters that several ranks hold: cost, messages, and frozen parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.strategy import Link, ModelSizes, SearchRequest, StepContext
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline.planning.cost import AGREEING_CALLS, tied_sums
from meshwright_pipeline.planning.survey import ModelSurvey
from meshwright_pipeline.runtime.tied_grads import Tie, TiedSum

LINK = Link("link", latency_s=1e-5, bandwidth_Bps=1e9)
REQUEST = SearchRequest(
    world_size=4, batch_size=8, sizes=ModelSizes(gradient_bytes=1000), step=StepContext(call_seconds=1e-6)
)


def known(model: nn.Module | None = None) -> ModelSurvey:
    sizes = {"a": 400, "b": 400, "c": 200}
    return ModelSurvey(("a", "b", "c"), {name: (name,) for name in sizes}, sizes, model)


def test_no_shared_parameters_cost_nothing() -> None:
    assert tied_sums([frozenset("a"), frozenset("bc")], known(), REQUEST, LINK) == (0.0, ())


def test_cost_of_two_and_of_several_holders() -> None:
    two, uses = tied_sums([frozenset("ab"), frozenset("ac")], known(), REQUEST, LINK)
    told = AGREEING_CALLS * 1e-6
    assert [(use.nbytes, use.count) for use in uses] == [(400, 1)]
    assert two == pytest.approx(LINK.seconds("send_recv", 400, 2) + told)
    three, uses = tied_sums([frozenset("ab"), frozenset("a"), frozenset("abc")], known(), REQUEST, LINK)
    assert sorted((use.nbytes, use.count) for use in uses) == [(400, 1), (400, 4)]
    assert three == pytest.approx(5 * LINK.seconds("send_recv", 400, 3) + told)
    # ranks of a stage may sum in another order, so gradients are equalized once more
    large, uses = tied_sums([frozenset("ab"), frozenset("ac")], known(), replace(REQUEST, world_size=8), LINK)
    assert uses[0].count == 2 and large == pytest.approx(2 * LINK.seconds("send_recv", 400, 2) + 2 * told)


def test_frozen_parameters_cost_nothing() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in "abc"})
    model["a"].requires_grad_(False)
    assert tied_sums([frozenset("ab"), frozenset("ac")], known(model), REQUEST, LINK) == (0.0, ())


TIES = [
    Tie(("a",), (0, 1)),
    Tie(("b", "b2"), (0, 1, 2)),
    Tie(("c",), (1, 2)),
    Tie(("d",), (0, 1)),
    Tie(("e",), (0, 2)),
]


def add(rank: int, size: int) -> tuple[dict[str, list[float] | None], list[int]]:
    """Gradients are rank + 1; "d" has another dtype, "c" no gradient on rank 1, "e" none, and rank 2 has "b2"."""
    import torch.distributed as dist

    summed = TiedSum(TIES, dist.group.WORLD)  # type: ignore[arg-type]
    names = {
        "b2" if name == "b" and rank == 2 else name
        for tie in TIES
        if rank in tie.ranks
        for name in tie.names[:1]
    }
    dtypes = {name: torch.float64 if name == "d" else torch.float32 for name in names}
    like = {name: torch.zeros(2, 3, dtype=dtypes[name]) for name in names}
    gradients: dict[str, torch.Tensor | None] = {
        name: None
        if name == "e" or (name, rank) == ("c", 1)
        else torch.full((2, 3), rank + 1.0, dtype=dtypes[name])
        for name in names
    }
    with communication() as log:
        sums = summed.sum(gradients, like, dtypes)
    return {name: None if g is None else g.flatten().tolist() for name, g in sorted(sums.items())}, [
        event.nbytes for event in log.events
    ]


@pytest.mark.slow
def test_holders_get_the_sum_of_their_gradients(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(3, add)
    first, second, third = ({name: g and g[0] for name, g in sums.items()} for sums, _ in ranks)
    assert first == {"a": 3.0, "b": 6.0, "d": 3.0, "e": None}
    assert second == {"a": 3.0, "b": 6.0, "c": 3.0, "d": 3.0}
    assert third == {"b2": 6.0, "c": 3.0, "e": None}
    assert sorted(ranks[0][1]) == [28, 28, 28, 56]  # six elements, and whether there are any


def frozen(rank: int, size: int) -> dict[str, float | None]:
    """One tied weight is frozen."""
    import torch.distributed as dist

    summed = TiedSum([Tie(("a",), (0, 1)), Tie(("b",), (0, 1))], dist.group.WORLD)  # type: ignore[arg-type]
    sums = summed.sum({"b": torch.ones(1)}, {"b": torch.ones(1)}, {"b": torch.float32})
    return {name: None if g is None else float(g) for name, g in sums.items()}


@pytest.mark.slow
def test_frozen_parameter_is_left_out(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, frozen) == [{"b": 2.0}] * 2
