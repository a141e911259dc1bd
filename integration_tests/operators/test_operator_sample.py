"""The sample of operators is as on one device, and the sweep finds a result that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright_dtensor.rules.node import RuleEntry, kept_rows
from meshwright_dtensor.rules.ops import reductions
from meshwright_dtensor.testing.rank_pool import RankPool

from .catalogue import by_name, operators, samples
from .judge import Outcome, Values, differs
from .run_ops import run_ops
from .sample import MESH, NAMES
from .sweep import worst
from .table import page, sharded


def _run(rank_pool: RankPool, names: list[str], folder: Path) -> list[Outcome]:
    ranks = rank_pool.run(2, run_ops, MESH, names, 1, str(folder / "case"), frozenset(), "cpu")
    return [worst(outcomes) for outcomes in zip(*ranks, strict=True)]


def test_the_catalogue_covers_the_database() -> None:
    assert len(operators()) == len(by_name()) > 650
    assert all(samples(by_name()[name], 1) for name in NAMES)


@pytest.mark.slow
def test_operators_are_those_of_one_device(rank_pool: RankPool, tmp_path: Path) -> None:
    outcomes = _run(rank_pool, list(NAMES), tmp_path)
    assert [o for o in outcomes if o.kind != "equal"] == []
    assert len(sharded(outcomes)) >= 0.9 * len(NAMES)
    text = page(NAMES, {"2": outcomes})
    assert f"{len(outcomes)}" in text


def run_with_a_wrong_rule(rank: int, world: int, folder: str) -> list[Outcome]:
    """The sweep of softmax while its rule takes the normalised dim for one that can be sharded."""
    true = reductions.RULES["aten._softmax"]
    reductions.RULES["aten._softmax"] = RuleEntry(
        lambda view: kept_rows(view, range(len(view.in_shapes[0]))), "hand"
    )
    try:
        return run_ops(rank, world, MESH, ["softmax"], 1, folder, frozenset(), "cpu")
    finally:
        reductions.RULES["aten._softmax"] = true


def test_a_wrong_rule_is_found(rank_pool: RankPool, tmp_path: Path) -> None:
    ranks = rank_pool.run(2, run_with_a_wrong_rule, str(tmp_path / "case"))
    outcomes = [worst(outcomes) for outcomes in zip(*ranks, strict=True)]
    assert {o.kind for o in outcomes} == {"equal", "silent"}
    assert "silent" in page(["softmax"], {"2": outcomes}).lower()


def test_a_wrong_result_is_found() -> None:
    state = torch.get_rng_state()

    def values(**changed: Any) -> Values:
        given = {"results": [torch.ones(3)], "structure": "*", "gradients": [torch.ones(2)], "same": True}
        return Values(**{**given, "generator": state, **changed})

    op = by_name()["add"]
    assert differs(op, values(), values()) == ""
    later = state.clone()
    later[-1] += 1
    for changed in (
        {"results": [torch.ones(3) + 1e-3]},
        {"results": [torch.ones(3, dtype=torch.float64)]},
        {"results": [torch.ones(1)]},
        {"gradients": [None]},
        {"gradients": [torch.zeros(2)]},
        {"same": False},
        {"generator": later},
    ):
        assert differs(op, values(), values(**changed)), changed
