"""Recomputation of real models under searched plans: targets of calls, dropout, attention, several axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import compare
from test_models import check
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import CASES, gpt2, llama

import meshwright as mw
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.eager import EagerPlanner, default_rules

RUNS = [
    ("llama", {"dp": 1, "tp": 2, "recompute": "full"}),
    ("gpt2", {"dp": 1, "tp": 2, "recompute": "selective"}),
    ("t5", {"dp": 1, "tp": 2, "recompute": "encoder.block.*"}),
    ("bert", {"dp": 2, "tp": 1, "recompute": "full"}),
    ("bert", {"dp": 2, "tp": 1, "zero": 3, "recompute": "full"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "options"), RUNS)
def test_a_recomputed_model_is_that_of_one_device(
    rank_pool: RankPool, case: str, options: dict[str, Any]
) -> None:
    for difference in rank_pool.run(2, compare, case, options):
        check(difference)


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations["product" if "mm." in str(func) else str(func)] += 1
        return func(*args, **(kwargs or {}))


def again(case: str, policy: str) -> tuple[Counter[str], Counter[str]]:
    """Operations that really run again in a step on one rank, and those that the planner has run again, by name."""
    ran = []
    for setting in (None, policy):
        torch.manual_seed(0)
        model, batch = DRY[case](), CASES[case].batch()
        request = PlanRequest(cluster="laptop-cpu", world_size=1, recompute=setting)
        search = Search(EagerPlanner().setting(model, batch, request, discover()), default_rules())
        evaluated = search.evaluate({})
        mw.auto_parallelize(model, batch, world_size=1, cluster="laptop-cpu", recompute=setting)
        with Counted() as counted:
            model(**batch).loss.backward()
        ran.append(counted.operations)
    planned = Counter[str]()
    for kind, part in evaluated.placement.again.items():
        name = evaluated.problem.tape.nodes[kind].name
        name = "product" if name == "linear" or "mm." in name else name
        planned[name] += round(part * evaluated.problem.quotient.node_count[kind])
    return ran[1] - ran[0], planned


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


DRY: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(attention_dropout=0.0),
    "gpt2": lambda: without_dropout(gpt2()),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "alternate", "selective"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_what_is_planned_to_run_again_does(case: str, policy: str) -> None:
    ran, planned = again(case, policy)
    names = (
        "product",
        "aten.tanh.default",
        "aten.silu.default",
        "aten.rsqrt.default",
        "aten.native_layer_norm.default",
    )
    assert {name: ran[name] for name in names} == {name: planned[name] for name in names}
    assert policy == "selective" or planned["product"]


def test_a_policy_means_the_repeated_blocks() -> None:
    torch.manual_seed(0)
    plan = mw.plan(CASES["llama"].model(), CASES["llama"].batch(), world_size=1, recompute="selective")
    assert [(rule.pattern, rule.policy) for rule in plan.recompute] == [("model.layers.*", "selective")]
    with pytest.raises(UsageError, match="recompute='blocks'"):
        mw.plan(CASES["plain"].model(), CASES["plain"].batch(), world_size=1, recompute="blocks")
