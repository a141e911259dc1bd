"""Shared training state and mixed precision, from the planner to the executed collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from test_planner_models import build, example

import meshwright as mw
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify
from meshwright_planner.evaluation.context import allowing

NAMES = {("zero", "all_gather"), ("zero", "reduce_scatter")}


def second_step(
    rank: int, world_size: int, options: dict[str, Any], name: str = "gpt2"
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Planned and executed collectives of parameters and gradients on the axis zero, of the second step."""
    batch, model = example(), build(name)
    mw.auto_parallelize(model, batch, cluster="laptop-cpu", **options)
    for _ in range(2):  # the first learns in which order units are used
        with communication() as log:
            model(**batch).loss.backward()
    executed, planned = Counter[Any](), Counter[Any]()
    for event in log.events:
        if event.function == "zero":
            executed[event.phase, event.kind, event.nbytes] += 1
    for c in model.parallel_plan.collectives:
        if (c.axis, c.kind) in NAMES:
            planned[c.phase, c.kind, c.nbytes] += c.count
    return dict(planned), dict(executed)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"zero": 2}, {"zero": 3, "precision": "bf16"}])
def test_what_is_planned_is_executed(rank_pool: RankPool, options: dict[str, Any]) -> None:
    for planned, executed in rank_pool.run(2, second_step, {"tp": 1, **options}):
        assert planned == executed and len(planned) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_of_experts_ranks_gather_what_ep_leaves_to_them(rank_pool: RankPool, stage: int) -> None:
    options = {"zero": stage, "dp": 2, "ep": 2, "tp": 1}
    for planned, executed in rank_pool.run(4, second_step, options, "mixtral"):
        assert moved(planned) == moved(executed) and len(planned) >= 3


def moved(collectives: dict[Any, int]) -> dict[Any, int]:
    """Bytes by phase and kind: gradients of experts travel apart from those that ranks of ep sum too."""
    counts = Counter[Any]()
    for (phase, kind, nbytes), count in collectives.items():
        counts[phase, kind] += nbytes * count
    return dict(counts)


def planned(rows: int = 8, **options: Any) -> Any:
    return mw.plan(build("gpt2"), example(rows), cluster="laptop-cpu", world_size=4, **options)


def used(plan: Any) -> dict[str, int]:
    return {axis: degree for axis, degree in plan.degrees.items() if degree > 1}


@pytest.mark.slow
def test_pins_and_degrees() -> None:
    assert used(planned(zero=2, tp=1)) == {"zero": 4}
    hybrid = planned(zero=3, zero_degree=2, dp=4)
    assert used(hybrid) == {"dp": 2, "zero": 2}
    assert hybrid.zero.stage == 3 and hybrid.strategies["zero"] == "zero"
    assert "zero stage 3" in hybrid.explain()
    assert used(planned(zero=1, dp=2, tp=2)) == {"zero": 2, "tp": 2}
    none = planned(zero=0, dp=4, tp=1)
    assert "zero" not in none.degrees and none.zero is None


@pytest.mark.slow
def test_it_is_taken_up_where_nothing_else_fits() -> None:
    plain, shared = planned(dp=4), [planned(dp=4, zero=stage) for stage in (1, 2, 3)]
    needed = [plan.predicted.total_bytes for plan in (plain, *shared)]
    assert needed == sorted(needed, reverse=True) and "zero" not in plain.degrees
    tight = planned(dp=4, memory_limit=allowing(needed[3]))
    assert tight.zero.stage == 3 and tight.predicted.total_bytes <= needed[3]
    assert planned(dp=4, memory_limit=allowing(needed[2])).zero is not None
    with pytest.raises(InfeasibleError):
        planned(dp=4, memory_limit=needed[3] // 2)


def test_precision_is_planned() -> None:
    # so many rows that both hold most when all activations are kept
    full, half = planned(16, dp=4, tp=1), planned(16, dp=4, tp=1, precision="bf16")
    assert half.precision.parameters == "bf16" and full.precision is None
    assert half.predicted.memory_bytes["activations"] < 0.75 * full.predicted.memory_bytes["activations"]
    assert half.predicted.memory_bytes["parameters"] == pytest.approx(
        1.5 * full.predicted.memory_bytes["parameters"], rel=1e-3
    )


def verified(rank: int, world_size: int, plan: Any) -> Any:
    report = verify(lambda: build("llama"), example(), plan)
    return report.ok, report.render()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"zero": 3, "zero_degree": 2}, {"zero": 2, "precision": "bf16"}])
def test_verified(rank_pool: RankPool, options: dict[str, Any]) -> None:
    plan = mw.plan(build("llama"), example(), cluster="laptop-cpu", world_size=4, dp=4, **options)
    for ok, text in rank_pool.run(4, verified, plan):
        assert ok, text


@pytest.mark.slow
def test_running_again_may_be_faster_than_gathering_twice() -> None:
    """On a slow network stage 2 with a little run again beats stage 3, though stage 3 fits with nothing run again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=24,
        num_attention_heads=32,
        vocab_size=50257,
    )
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.empty(64, 1024, dtype=torch.long)
    options = {"cluster": "p3.16xlarge", "world_size": 16, "precision": "bf16", "tp": 1, "pp": 1, "cp": 1}
    free = mw.plan(model, {"input_ids": ids, "labels": ids}, **options)
    steps = [
        mw.plan(model, {"input_ids": ids, "labels": ids}, zero=stage, **options).predicted.step_seconds
        for stage in (2, 3)
    ]
    assert steps[0] < steps[1] and free.predicted.step_seconds <= steps[0]
