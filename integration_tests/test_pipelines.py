"""Pipelines with everything around them: planned, verified against one device, with other parallelisms inside a stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_dropout import LIMIT, losses
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError, StageError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify


def check(rank: int, size: int, model: str, pins: dict[str, Any], max_norm: float | None) -> list[str]:
    """Two steps, every gradient, parameter and momentum; dropout on, labels ignored unevenly."""
    case = CASES[model]
    torch.manual_seed(0)
    built = case.model()
    batch = case.batch()
    plan = plan_once(built, batch, cluster="laptop-cpu", microbatches=2, **pins)
    assert plan.pipeline is not None and plan.pipeline.microbatches == 2
    report = verify(
        case.model,
        batch,
        plan,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        max_norm=max_norm,
    )
    return [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


ONE = {"dp": 1, "tp": 1, "cp": 1}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "t5", "mixtral"])
def test_planned_pipelines_are_one_device(rank_pool: RankPool, model: str) -> None:
    for failures in rank_pool.run(2, check, model, {"pp": 2, **ONE}, 1.0):
        assert not failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        ("gpt2", {**ONE, "dp": 2}),
        ("llama", {**ONE, "tp": 2, "sequence_parallel": True}),
        ("bert", {**ONE, "dp": 2, "zero": 3}),
        ("llama", {**ONE, "dp": 2, "zero": 1, "precision": "bf16"}),
    ],
    ids=["dp", "tp", "zero3", "zero1-bf16"],
)
def test_other_parallelisms_work_inside_a_stage(
    rank_pool: RankPool, model: str, pins: dict[str, Any]
) -> None:
    for failures in rank_pool.run(4, check, model, {"pp": 2, **pins}, 0.5):
        assert not failures


def outside(output: Any) -> torch.Tensor:
    """A loss outside of the model, of labels that it has not seen."""
    logits = output.logits if hasattr(output, "logits") else output["logits"]
    labels = torch.randint(
        logits.shape[-1], tuple(logits.shape[:2]), generator=torch.Generator().manual_seed(2)
    )
    loss: torch.Tensor = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss


def check_outside(rank: int, size: int, model: str, pins: dict[str, Any]) -> list[str]:
    """Two steps with the loss outside of the model, and recomputation where `pins` say so; dropout is on."""
    case = CASES[model]
    torch.manual_seed(0)
    batch = {"input_ids": case.batch()["input_ids"]}
    plan = plan_once(case.model(), case.batch(), cluster="laptop-cpu", **pins)
    report = verify(case.model, batch, plan, loss=outside)
    return [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins"),
    [("gpt2", {**ONE, "dp": 2, "zero": 3}), ("llama", {**ONE, "tp": 2, "recompute": "full"})],
    ids=["zero3", "tp-recompute"],
)
def test_a_loss_outside_of_the_model(rank_pool: RankPool, model: str, pins: dict[str, Any]) -> None:
    for failures in rank_pool.run(4, check_outside, model, {"pp": 2, "microbatches": 2, **pins}):
        assert not failures


def alone(rank: int, size: int) -> str:
    """The second data rank is given longer rows, all along its pipeline."""
    case = CASES["gpt2"]
    torch.manual_seed(0)
    plan = plan_once(case.model(), case.batch(), cluster="laptop-cpu", pp=2, **{**ONE, "dp": 2})
    torch.manual_seed(0)
    model = mw.parallelize(case.model(), plan)
    batch = {name: value[:, : 8 + rank % 2] for name, value in case.batch().items()}
    try:
        model(**batch)
    except StageError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_data_ranks_with_different_batches_are_told(rank_pool: RankPool) -> None:
    for told in rank_pool.run(4, alone, timeout=120):
        assert (
            "ranks of one stage were given different batches" in told and "give every rank the same" in told
        )


@pytest.mark.slow
def test_losses_with_dropout_stay_those_of_one_device(rank_pool: RankPool) -> None:
    """python integration_tests/pipeline_dropout.py runs fifty steps."""
    for results in rank_pool.run(4, losses, 6, "1f1b"):
        assert max(abs(single - other) / single for single, other in results) < LIMIT


def differ(rank: int, size: int, rows: int, length: int, pins: dict[str, Any]) -> tuple[str, float]:
    """(what this rank is told where rank 1 is given another batch, loss of the next step)."""
    torch.manual_seed(0)
    built, batch = CASES["llama"].model(), CASES["llama"].batch()
    model = mw.parallelize(built, plan_once(built, batch, cluster="laptop-cpu", **pins), batch=batch)
    given = {k: v[:rows, :length] for k, v in batch.items()} if rank == 1 else batch
    told = "nothing"
    try:
        model(**given).loss.backward()
    except MeshwrightError as error:
        told = f"{type(error).__name__} {error}"
    return told, model(**batch).loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "length", "says", "pins"),
    [
        (3, 100, "give every rank the same", {"tp": 2}),
        (4, 5, "give every rank the same", {"dp": 2, "zero": 3}),
    ],
    ids=["tp", "zero3"],
)
def test_peers_in_a_stage_do_not_wait_for_a_rank_that_has_another_batch(
    rank_pool: RankPool, rows: int, length: int, says: str, pins: dict[str, Any]
) -> None:
    results = rank_pool.run(4, differ, rows, length, {"pp": 2, "microbatches": 2, **ONE, **pins}, timeout=100)
    for rank, (told, after) in enumerate(results):
        assert told != "nothing" and (says in told or rank == 1), told
        assert after == results[0][1]
