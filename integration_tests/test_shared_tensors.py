"""Pipelines of models that write to tensors which several modules hold: equal to one device, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_tensor_models import KEPT, REFUSED, ROWS, RUN, WIDTH, Keeping

import meshwright as mw
from meshwright_dtensor.errors import PlanError, UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify

PINS: dict[str, Any] = {"pp": 2, "dp": 1, "tp": 1, "cp": 1, "schedule": "1f1b", "cluster": "laptop-cpu"}


def batch() -> dict[str, torch.Tensor]:
    """A batch."""
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))}


def by_hand(microbatches: int) -> ParallelPlan:
    """Two stages, of two layers each."""
    rule = PipelineRule(stages=[["layers.[01]"], ["layers.[23]"]], microbatches=microbatches)
    return ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)


def check(rank: int, size: int, names: list[str]) -> dict[str, list[str]]:
    """What differs from one device in two steps."""
    outcomes = {}
    for name in names:
        report = verify(RUN[name], batch(), by_hand(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        outcomes[name] = [f"{failure.kind} {failure.name}" for failure in report.failures]
    return outcomes


@pytest.mark.slow
def test_what_one_stage_or_all_stages_have_is_that_of_one_device(rank_pool: RankPool) -> None:
    for outcomes in rank_pool.run(2, check, list(RUN)):
        assert outcomes == {name: [] for name in RUN}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_would_have_each_for_themselves_is_refused_when_planning(name: str) -> None:
    make, says = REFUSED[name]
    with pytest.raises(PlanError, match=f"degrees.pp is 2: .*{says}"):
        mw.plan(make(), batch(), world_size=2, microbatches=1, **PINS)


@pytest.mark.parametrize("name", [name for name in RUN if "trained" not in name])
def test_several_microbatches_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"microbatches is 2: .* writes to its"):
        mw.plan(RUN[name](), batch(), world_size=2, microbatches=2, **PINS)


def refusals(rank: int, size: int, names: list[str]) -> dict[str, str]:
    """The errors of the first steps of plans by hand."""
    outcomes = {}
    for name in names:
        try:
            mw.parallelize(REFUSED[name][0](), by_hand(1), batch=batch())(**batch())
        except (PlanError, UnsupportedError) as error:
            outcomes[name] = str(error)
    return outcomes


@pytest.mark.slow
def test_plans_by_hand_are_refused_in_the_first_step(rank_pool: RankPool) -> None:
    for outcomes in rank_pool.run(2, refusals, list(REFUSED)):
        for name, (_, says) in REFUSED.items():
            assert says in outcomes.get(name, "not refused"), name


def kept(rank: int, size: int) -> tuple[list[float], dict[str, str]]:
    """How far the losses of three steps are from one device's, and what reading kept results says after the last one."""
    torch.manual_seed(0)
    model, single = Keeping(), Keeping()
    single.load_state_dict(model.state_dict())
    model = mw.parallelize(model, by_hand(1), batch=batch())
    gaps = []
    for _ in range(3):
        loss, expected = model(**batch())["loss"], single(**batch())["loss"]
        loss.backward()
        gaps.append(float(loss - expected))
    says = {}
    for name, get in KEPT.items():
        try:
            says[name] = f"{float(get(model).sum())} for {float(get(single).sum())}"
        except UnsupportedError as error:
            says[name] = str(error)
    return gaps, says


@pytest.mark.slow
def test_results_in_attributes_cannot_be_read_after_a_step(rank_pool: RankPool) -> None:
    for gaps, says in rank_pool.run(2, kept):
        assert max(map(abs, gaps)) < 1e-6
        assert all("in a pipeline each stage has its own" in text for text in says.values()), says
