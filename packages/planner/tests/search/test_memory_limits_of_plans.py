"""Memory limits: predicted memory, the effect of a limit on the plan, and the error when nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from planner_models import DGX_H100, LAPTOP_CPU, Transformer, best, eager, tokens
from torch import nn

from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.context import allowing

LINKS = tuple(replace(link, protocols=()) for link in LAPTOP_CPU.links)
PROMPT = {"world_size": 2, "tp": 2, "cluster": replace(LAPTOP_CPU, links=LINKS)}
"""Collectives that start at once, so that there are as many as save memory."""


def test_predicted_memory_of_a_model_with_parameters_only() -> None:
    model = nn.Linear(256, 256, bias=False)
    for optimizer, states in (("adamw", 2), ("sgd", 0), ("sgd-momentum", 1)):
        plan = best(model, torch.randn(2, 256), optimizer=optimizer)
        assert plan.predicted is not None
        memory = plan.predicted.memory_bytes
        size = 256 * 256 * 4
        assert (memory["parameters"], memory["optimizer"]) == (size, states * size)
        if optimizer == "adamw":  # it holds most when the optimizer steps, which copies the parameter twice
            assert (memory["gradients"], memory["temporaries"], memory["activations"]) == (size, 2 * size, 0)
        else:  # while the gradient is made: the input is kept for it, and the gradient of the result is there
            kept = result = 2 * 256 * 4
            assert memory["activations"] == kept
            assert memory["gradients"] + memory["temporaries"] == size + result
    half = best(model, torch.randn(2, 256), world_size=2, tp=2)
    assert half.predicted is not None and half.predicted.memory_bytes["parameters"] == size // 2


def test_infeasible_error_names_excess_and_changes_that_fit() -> None:
    model = Transformer(layers=2, hidden=128)
    whole = best(model, tokens(rows=2)).predicted
    assert whole is not None
    small = replace(LAPTOP_CPU, memory_bytes=int(whole.total_bytes * 0.6))
    with pytest.raises(InfeasibleError) as caught:
        best(model, tokens(rows=2), cluster=small, world_size=1)
    text = str(caught.value)
    assert (
        "dp 1 x tp 1 needs" in text  # the optimizer's step holds most: recomputing would change nothing
        and "too much" in text
        and "world_size=2: dp 1 x tp 2" in text
    )
    lines = text.splitlines()
    assert lines[0].startswith("no plan for 1 rank ") and "Would fit:" in lines
    assert max(map(len, lines)) <= 100 - len("Error: ")
    reasons = [line for line in lines if line.startswith("  - ")]
    assert sum("too much" in line for line in reasons) == 1 and len(reasons) > 2
    assert any(line.startswith("  - world_size=2: dp 1 x tp 2") for line in reasons)
    # the negative control: what is advised does fit
    assert best(model, tokens(rows=2), cluster=small, world_size=2, tp=2).degree("tp") == 2


@pytest.mark.parametrize(
    ("sizes", "pins", "fits", "line"),
    [
        (
            (4, 16, 128),
            {"recompute": "selective"},
            {"recompute": "full"},
            "without recompute='selective': dp 1 x tp 1, recompute",
        ),
        (
            (4, 16, 128),
            {"precision": "fp32", "recompute": "full"},
            {"precision": "bf16", "recompute": "full"},
            'precision="bf16": dp 1 x tp 1',
        ),
        (
            (4, 16, 128),
            {**PROMPT, "sequence_parallel": False, "recompute": "full"},
            {**PROMPT, "sequence_parallel": True, "recompute": "full"},
            "without sequence_parallel=False: dp 1 x tp 2, recompute full",
        ),
    ],
    ids=["recompute", "precision", "sequence"],
)
def test_infeasible_error_tries_without_each_pin(
    sizes: tuple[int, int, int], pins: dict[str, Any], fits: dict[str, Any], line: str
) -> None:
    layers, rows, length = sizes
    model, batch = Transformer(layers=layers), tokens(rows=rows, length=length)
    enough = best(model, batch, **fits).predicted
    assert enough is not None
    limit = allowing(enough.total_bytes)
    with pytest.raises(InfeasibleError) as caught:
        best(model, batch, memory_limit=limit, **pins)
    assert f"  - {line}" in str(caught.value)
    assert best(model, batch, memory_limit=limit, **fits)  # the negative control


def test_infeasible_error_tries_without_all_pins_when_one_is_not_enough() -> None:
    model, batch = Transformer(layers=4, hidden=128), tokens(rows=8, length=64)
    each = [
        best(model, batch, world_size=2, **pins).predicted
        for pins in (
            {"dp": 2, "recompute": "full"},
            {"tp": 2, "recompute": "selective"},
            {"tp": 2, "recompute": "full"},
        )
    ]
    replicas, kept, both = (candidate.total_bytes for candidate in each if candidate is not None)
    assert allowing(both) < min(replicas, kept)
    with pytest.raises(InfeasibleError, match=r"\n  - without tp=1, recompute='selective': dp 1 x tp 2, rec"):
        best(model, batch, world_size=2, tp=1, recompute="selective", memory_limit=allowing(both))


@pytest.mark.parametrize("world_size", [1, 4])
def test_infeasible_error_names_a_sufficient_memory_limit(world_size: int) -> None:
    """However small the limit, one fix is left, and it works."""
    model = Transformer(layers=2, hidden=128)
    with pytest.raises(InfeasibleError, match=r"Would fit:\n(.*\n)*  - memory_limit=") as caught:
        best(model, tokens(rows=2), world_size=world_size, memory_limit=1000)
    match = re.search(r"memory_limit=(\d+)", str(caught.value))
    assert match is not None
    enough = int(match[1])
    plan = best(model, tokens(rows=2), world_size=world_size, memory_limit=enough)
    assert plan.predicted is not None and plan.predicted.total_bytes <= enough
    with pytest.raises(InfeasibleError):
        best(model, tokens(rows=2), world_size=world_size, memory_limit=enough * 9 // 10)


@pytest.mark.parametrize(("limit", "noted"), [("70GiB", False), ("500GiB", True), (None, False)])
def test_note_on_a_memory_limit_above_the_device_memory(limit: str | None, noted: bool) -> None:
    plan = best(Transformer(layers=1), tokens(), cluster=DGX_H100, world_size=1, memory_limit=limit)
    note = (
        "the memory limit of 500.0 GiB is more than the 73.1 GiB that a model can use on a device of dgx-h100"
    )
    assert (note in plan.provenance.notes) == noted
    assert noted == any("memory limit" in text for text in plan.provenance.notes)


def test_note_on_a_plan_that_needs_more_than_the_device_memory() -> None:
    small = replace(DGX_H100, memory_bytes=DGX_H100.reserved_bytes + 2**20)
    plan = best(Transformer(layers=2), tokens(), cluster=small, world_size=1, memory_limit="1GiB")
    assert any(text.endswith("; this plan needs devices with more memory") for text in plan.provenance.notes)


def test_memory_limit_changes_the_best_plan() -> None:
    model, batch = Transformer(layers=2, hidden=128), tokens(rows=4)
    fast, *others = eager().plan(model, batch, PlanRequest(cluster=DGX_H100, world_size=4, top_k=9))
    least = min(p.predicted.total_bytes for p in others if p.predicted)
    assert fast.predicted is not None and fast.predicted.total_bytes > least
    tight = best(model, batch, cluster=DGX_H100, world_size=4, memory_limit=allowing(least))
    assert tight.predicted is not None and tight.predicted.total_bytes <= least
