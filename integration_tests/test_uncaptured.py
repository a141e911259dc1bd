"""Planning captures no graph, whatever is planned: plain models, experts, pipelines, divided sequences, recomputation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from zoo import CASES

import meshwright as mw


def _captures() -> ModuleType:
    """The planner's own tests say what captures."""
    path = Path(__file__).parents[1] / "packages/planner/tests/captures.py"
    spec = importlib.util.spec_from_file_location("captures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "pins"),
    [
        ("llama", {"world_size": 4}),
        ("mixtral", {"world_size": 2, "ep": 2}),
        ("gpt2", {"world_size": 2, "pp": 2, "microbatches": 2}),
        ("llama", {"world_size": 2, "cp": 2}),
        ("gpt2", {"world_size": 2, "zero": 3, "recompute": "selective"}),
        ("gpt2", {"world_size": 2, "planner": "mcmc"}),
    ],
    ids=["searched", "experts", "pipeline", "context", "recomputed", "mcmc"],
)
def test_no_graph_is_captured(case: str, pins: dict[str, Any]) -> None:
    model, batch = CASES[case].model(), CASES[case].batch()
    with _captures().refused():
        plans = mw.plan(model, batch, cluster="laptop-cpu", top_k=3, **pins)
    assert isinstance(plans, list) and plans[0].world_size == pins["world_size"]
