"""Pipelines of models that pass tensors in objects and attributes: equal to one device, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_once import plan_once
from side_models import REFUSED, RUN, Left, Measured, Switching, appended, numbers, sets_a_number

import meshwright as mw
from meshwright_dtensor.errors import PlanError, StageError, UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify

PINS: dict[str, Any] = {"pp": 2, "dp": 1, "tp": 1, "cp": 1, "schedule": "1f1b", "cluster": "laptop-cpu"}


def check(rank: int, size: int, name: str, microbatches: int) -> list[str]:
    """What differs from one device in two steps."""
    make = RUN[name]
    torch.manual_seed(0)
    plan = plan_once(make(), numbers(), microbatches=microbatches, **PINS)
    report = verify(make, numbers(), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    return [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", RUN)
def test_side_values_are_those_of_one_device(rank_pool: RankPool, name: str, microbatches: int) -> None:
    for wrong in rank_pool.run(2, check, name, microbatches):
        assert not wrong


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_is_refused_when_planning(name: str, microbatches: int) -> None:
    make, says = REFUSED[name]
    with pytest.raises(PlanError, match=f"degrees.pp is 2: .*{says}"):
        mw.plan(make(), numbers(), world_size=2, microbatches=microbatches, **PINS)


@pytest.mark.parametrize("name", REFUSED)
def test_plans_say_why_there_is_no_pipeline(name: str) -> None:
    make, says = REFUSED[name]
    plan = mw.plan(make(), numbers(), world_size=2, cluster="laptop-cpu")
    assert plan.degree("pp") == 1
    assert any(note.startswith("no pp: ") and says in note for note in plan.provenance.notes)


def by_hand_plan(microbatches: int = 2) -> ParallelPlan:
    """Two stages, of two layers each."""
    rule = PipelineRule(stages=[["layers.[01]"], ["layers.[23]"]], microbatches=microbatches)
    return ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)


def by_hand(rank: int, size: int, name: str) -> list[str]:
    """What differs from one device."""
    report = verify(REFUSED[name][0], numbers(), by_hand_plan())
    return [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_is_refused_in_the_first_step(rank_pool: RankPool, name: str) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[name][1]):
        rank_pool.run(2, by_hand, name)


def test_numbers_of_all_rows_in_attributes_take_one_microbatch() -> None:
    plan = mw.plan(Left(sets_a_number), numbers(), world_size=2, **PINS)
    assert plan.pipeline is not None and plan.pipeline.microbatches == 1
    with pytest.raises(PlanError, match="computes a scalar from its rows"):
        mw.plan(Left(sets_a_number), numbers(), world_size=2, microbatches=2, **PINS)


def other_values(rank: int, size: int) -> list[float]:
    """Two steps of a model whose layers store other plain values in each."""
    model = mw.parallelize(Measured(appended, len), by_hand_plan(1), batch=numbers())
    return [float(model(**numbers())["loss"]) for _ in range(2)]


@pytest.mark.slow
def test_plain_values_that_change_are_refused(rank_pool: RankPool) -> None:
    with pytest.raises(StageError, match=r"stores 'made' = \[1, 1\], and other stages have \[1\]"):
        rank_pool.run(2, other_values)


def switched(rank: int, size: int) -> list[float]:
    """Three steps of a model that counts them in a list."""
    torch.manual_seed(0)
    model, single = (Switching() for _ in range(2))
    single.load_state_dict(model.state_dict())
    model = mw.parallelize(model, by_hand_plan(1), batch=numbers())
    return [float(model(**numbers())["loss"] - single(**numbers())["loss"]) for _ in range(3)]


@pytest.mark.slow
def test_plain_state_of_the_model_is_that_of_all_its_code(rank_pool: RankPool) -> None:
    assert all(abs(gap) < 1e-6 for gaps in rank_pool.run(2, switched) for gap in gaps)
