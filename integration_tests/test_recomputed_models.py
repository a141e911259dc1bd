"""Recomputation of real models under searched plans: targets of calls, dropout, attention, several axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import compare
from test_models import check
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing import RankPool

RUNS = [
    ("llama", {"dp": 1, "tp": 2, "recompute": "full"}),
    ("gpt2", {"dp": 1, "tp": 2, "recompute": "selective"}),
    ("t5", {"dp": 1, "tp": 2, "recompute": "encoder.block.*"}),
    ("bert", {"dp": 2, "tp": 1, "recompute": "full"}),
    ("bert", {"dp": 2, "tp": 1, "zero": 3, "recompute": "full"}),
]


@pytest.mark.parametrize(("case", "options"), RUNS)
def test_a_recomputed_model_is_that_of_one_device(
    rank_pool: RankPool, case: str, options: dict[str, Any]
) -> None:
    for difference in rank_pool.run(2, compare, case, options):
        check(difference)


def test_a_policy_means_the_repeated_blocks() -> None:
    torch.manual_seed(0)
    plan = mw.plan(CASES["llama"].model(), CASES["llama"].batch(), world_size=1, recompute="selective")
    assert [(rule.pattern, rule.policy) for rule in plan.recompute] == [("model.layers.*", "selective")]
    with pytest.raises(UsageError, match="recompute='blocks'"):
        mw.plan(CASES["plain"].model(), CASES["plain"].batch(), world_size=1, recompute="blocks")
