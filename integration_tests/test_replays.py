"""The predicted time of a step against its replay, over degrees and schedules; both must order two plans alike."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.clusters.registry import DGX_H100, LAPTOP_CPU
from meshwright_planner.reports.explain import explain
from meshwright_planner.simulation.events import run
from meshwright_planner.simulation.replay import simulate
from meshwright_planner.simulation.workload import Faults, Workload

SAME = 1e-6
"""By what part both may differ where ranks share nothing: both run the same passes and messages."""
SHARED = 0.035
"""The same where they share parameters: how far gathers hide is predicted of whole passes, and replayed block by block."""
SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")


@functools.cache
def llama(width: int) -> nn.Module:
    sizes = {"num_attention_heads": width // 64, "num_key_value_heads": 2, "intermediate_size": 3 * width}
    config = LlamaConfig(hidden_size=width, num_hidden_layers=16, vocab_size=8 * width, **sizes)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def ids(tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.int64)


@functools.cache
def planned(world: int, cluster: str = "dgx-h100", loss: bool = True, **pins: Any) -> ParallelPlan:
    """A step of four rows a rank where microbatches are not said, else one row each."""
    measured, width, tokens = (LAPTOP_CPU, 256, 64) if cluster == "laptop-cpu" else (DGX_H100, 1024, 1024)
    batch = {"input_ids": ids(tokens), **({"labels": ids(tokens)} if loss else {})}
    rows = pins["dp"] * pins.get("microbatches", 4)
    precision = None if measured is LAPTOP_CPU else "bf16"
    return mw.plan(
        llama(width), batch, cluster=measured, world_size=world, global_batch_size=rows, precision=precision, cp=1, **pins
    )  # fmt: skip


def differs(plan: ParallelPlan, cluster: Any = DGX_H100) -> float:
    """By what part the replay takes longer than predicted."""
    assert plan.predicted is not None
    return simulate(plan, cluster).seconds / plan.predicted.step_seconds - 1


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(4, 2), (8, 1)])
def test_schedules_take_what_is_predicted_and_are_ranked_alike(pp: int, tp: int) -> None:
    times: dict[str, tuple[float, float]] = {}
    for schedule in SCHEDULES:
        pins = {"pp": pp, "tp": tp, "dp": 64 // pp // tp, "zero": 0, "microbatches": 2 * pp}
        plan = planned(64, schedule=schedule, **pins)
        assert plan.predicted is not None
        times[schedule] = plan.predicted.step_seconds, simulate(plan, DGX_H100).seconds
    assert {name: replayed / predicted - 1 for name, (predicted, replayed) in times.items()} == {
        name: pytest.approx(0, abs=SAME) for name in times
    }
    for (a, first), (b, second) in itertools.combinations(times.items(), 2):
        if abs(first[0] / second[0] - 1) > 2 * SAME:
            assert (first[0] < second[0]) == (first[1] < second[1]), (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"sequence_parallel": True}, {"recompute": "full"}, {"loss": False}])
def test_collectives_of_each_pass_are_in_both(pins: dict[str, Any]) -> None:
    """Forwards, input gradients and weight gradients have different ones; recomputation repeats those of forwards."""
    for schedule in ("1f1b", "zero-bubble"):
        plan = planned(64, pp=4, tp=8, dp=2, zero=0, schedule=schedule, microbatches=8, **pins)
        assert plan.predicted is not None and plan.predicted.split is not None
        sent = [time.collectives["tp"] for time in plan.predicted.split.stages]
        assert all(min(passes) > 0 for passes in sent)
        link = DGX_H100.link(1, 8)
        listed = (c.count * link.seconds(c.kind, c.nbytes, 8) for c in plan.collectives if c.axis == "tp")
        counted = 8 * sum(map(sum, sent)) + sum(plan.predicted.split.between_collectives.values())
        # shards of the sequence are copied too; of what runs again a plan lists whole collectives
        assert counted == pytest.approx(sum(listed), rel=0.1 if "sequence_parallel" in pins else 5e-3)
        assert abs(differs(plan)) < SAME, schedule
        # as if half of those in the backward were in weight gradients
        halves = [(forward, backward / 2) for forward, backward in sent]
        split = plan.predicted.split.model_copy(update={"stages": tuple(
            time.model_copy(update={"collectives": {"tp": half}})
            for time, half in zip(plan.predicted.split.stages, halves)
        )})  # fmt: skip
        fewer = plan.replace(predicted=plan.predicted.model_copy(update={"split": split}))
        assert abs(differs(fewer)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_stages_that_gather_take_what_is_predicted(schedule: str, zero: int) -> None:
    for pp, microbatches, tp in ((2, 8, 2), (4, 8, 1), (4, 1, 2)):
        if microbatches < pp and schedule == "interleaved":
            continue
        pins = {"pp": pp, "tp": tp, "dp": 64 // pp // tp, "zero": zero}
        plan = planned(64, schedule=schedule, microbatches=microbatches, **pins)
        assert abs(differs(plan)) < SHARED, (pp, microbatches, tp)


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 512])
def test_plans_without_stages_take_what_is_predicted(world: int) -> None:
    assert abs(differs(planned(world, dp=world, tp=1, pp=1, zero=0))) < 1e-9
    for tp, how in (
        (1, {"zero": 1}),
        (2, {"zero": 3}),
        (1, {"zero": 2, "zero_degree": world // 4}),
        (2, {"zero": 3, "zero_degree": world // 4}),
    ):
        # gathers of a small model over 256 ranks take longer than the blocks that hide them
        most = SHARED if world == 8 else 0.055
        assert abs(differs(planned(world, pp=1, tp=tp, dp=world // tp, **how))) < most, (tp, how)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [True, False])
def test_so_where_hosts_hide_nothing(loss: bool) -> None:
    """Of a model that returns no loss, the code after the stages runs once, on the whole batch."""
    apart = replace(LAPTOP_CPU, crowding=(), cores=0)  # ranks that share cores are told in a note
    for schedule, pp in itertools.product(("1f1b", "zbv"), (2, 4)):
        pins = {"pp": pp, "tp": 1, "dp": 8 // pp, "zero": 0, "schedule": schedule, "microbatches": 8}
        plan = planned(8, "laptop-cpu", loss, **pins)
        assert plan.pipeline is not None and plan.pipeline.loss == ("microbatches" if loss else "batch")
        assert abs(differs(plan, apart)) < 0.01, (schedule, pp)


@pytest.mark.slow
def test_one_microbatch_hides_no_sums() -> None:
    """A pipeline does not hide them under its backward pass: gradients go to autograd after the schedule."""
    plan = planned(64, pp=2, tp=1, dp=32, zero=0, schedule="zbv", microbatches=1)
    assert plan.predicted is not None and plan.predicted.split is not None
    sums = [c for c in plan.collectives if c.axis == "dp"]
    link = DGX_H100.link(1, 32)
    whole = sum(c.count * link.seconds("all_reduce", c.nbytes, 32) for c in sums)
    assert plan.predicted.split.exposed["dp"] == pytest.approx(whole)
    assert "dp" not in plan.predicted.split.hidden


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 32, "tp": 2, "pp": 1, "zero": 3},
        {"dp": 4, "tp": 8, "pp": 2, "zero": 2, "schedule": "interleaved", "microbatches": 4},
        {"dp": 4, "tp": 4, "pp": 4, "zero": 0, "schedule": "1f1b", "microbatches": 8},
    ],
)
def test_better_links_gain_at_most_the_exposed_time_that_a_plan_shows(pins: dict[str, Any]) -> None:
    """The replay alone says so of planned steps, without the bound that `explain` puts on it."""
    plan = planned(64, **pins)
    cluster = DGX_H100.running(64)
    (view,) = explain(plan, cluster=cluster).plans
    assert view.upgrades and plan.predicted is not None
    for upgrade in view.upgrades:
        assert upgrade.today == pytest.approx(plan.predicted.step_seconds)
        name = upgrade.what.split()[0]
        over = sum(s for axes, s in view.seconds.items() if name in view.links.get(axes, ()))
        if name == "devices":
            continue
        fast = Workload(plan, cluster, Faults(everywhere=frozenset({(name, 2.0)})))
        gain = simulate(plan, cluster).seconds - run(fast.programs()).seconds
        assert 0 <= gain <= over + 1e-9 and upgrade.today - upgrade.seconds == pytest.approx(
            gain, rel=0.05, abs=1e-6
        )
