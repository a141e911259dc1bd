"""A sample of the border sweep, and that it sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright_dtensor.testing.rank_pool import RankPool

from . import run
from .cases import Case
from .registry import all_keys, keys_of
from .subjects import LOOP_PLANS, PLANS, Subject
from .sweep import sweep
from .table import page

MENDED = (
    "utils.parametrize.register_parametrization | 1",
    "utils.parametrizations.weight_norm | 1",
    "autograd.gradcheck | 1",
    "autograd.graph.disable_saved_tensors_hooks | 1",
    "autograd.hooks | 3",
    "autograd.Variable | 1",
    "func.functional_call | 1",
    "func.functional_call | 3",
    "func.jvp | 1",
    "Module.load_state_dict | b 6",
    "utils.prune.L1Unstructured | 1",
    "Tensor.__format__ | parameter b.weight | ('')",
    "Tensor.__ipow__ | gradient b.weight | ()",
    "Tensor.apply_ | activation own | (lambda y: y + 1)",
    "Tensor.as_strided | parameter b.weight | ((2, 3), (1, 2), 1)",
    "Tensor.as_strided | gradient b.weight | ((2, 3), (1, 2), 1)",
    "Tensor.as_subclass | parameter b.weight | (torch.Tensor)",
    "Tensor.backward | parameter b.weight | (same(x))",
    "Tensor.float | parameter b.weight | ()",
    "Tensor.grad | buffer own | get",
    "Tensor.imag | gradient b.weight:complex | = same(x)",
    "Tensor.is_shared | parameter b.weight | ()",
    "Tensor.map_ | no_grad parameter b.weight | (same(x), lambda y, z: y + z)",
    "Tensor.module_load | gradient b.weight:int | (same(x))",
    "Tensor.mT | loss own | get",
    "Tensor.mul_ | activation own | (0.5)",
    "Tensor.requires_grad_ | gradient b.weight | ()",
    "Tensor.retain_grad | parameter b.weight | ()",
    "Tensor.set_ | state_dict b.weight | (same(x))",
    "Tensor.sparse_mask | gradient b.weight | (same(x).to_sparse())",
    "Tensor.to | parameter b.weight | (torch.float32, copy=True)",
    "Tensor.transpose_ | no_grad parameter b.weight | (0, 1)",
    "Tensor.uniform_ | no_grad parameter b.weight | ()",
)
"""Cases of kinds that were wrong once."""

FINE = ("equal", "refused", "same error", "not tried")


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(PLANS))
def test_a_sample_is_as_on_one_device_or_refused(rank_pool: RankPool, plan: str) -> None:
    keys = all_keys()
    assert set(MENDED) <= set(keys)
    outcomes = list(sweep([*keys[::400], *MENDED], [plan], rank_pool))
    assert len(outcomes) > 38
    assert [each for each in outcomes if each.kind not in FINE] == []
    assert f"| torch.Tensor | {plan} |" in page(outcomes)


LOOPS_MENDED = ("loop.tensor hook | model", "loop.deepcopy for an average | model")


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(LOOP_PLANS))
def test_loops_of_four_ranks_are_as_on_one_device_or_refused(rank_pool: RankPool, plan: str) -> None:
    keys = [*keys_of(plan)[::12], *LOOPS_MENDED]
    outcomes = list(sweep(keys, [plan], rank_pool))
    assert len(outcomes) == len(keys)
    assert [each for each in outcomes if each.kind not in FINE] == []


def _of_a_part(made: Subject) -> Any:
    x = made.model.b.weight
    return (x.to_local() if hasattr(x, "to_local") else x).detach().sum()


def _written(made: Subject) -> None:
    x = made.model.b.weight.detach()
    (x.to_local() if hasattr(x, "to_local") else x).mul_(2 if type(x) is Tensor else 3)


def _on_one_rank(made: Subject) -> Any:
    if hasattr(made.model.b.weight, "to_local") and torch.distributed.get_rank():
        raise KeyError("only here")


CONTROLS: dict[str, tuple[Callable[[Subject], Any], str]] = {
    "part": (_of_a_part, "SILENT"),
    "written": (_written, "SILENT"),
    "one rank": (_on_one_rank, "one rank"),
    "other error": (lambda made: made.model.nothing, "same error"),
}


def controls(rank: int, size: int) -> list[str]:
    ranks = run.Ranks("tp2")
    return [ranks.outcome(Case("control", name, "", use)).kind for name, (use, _) in CONTROLS.items()]


def test_what_is_wrong_is_seen(rank_pool: RankPool) -> None:
    for kinds in rank_pool.run(2, controls, timeout=60):
        assert kinds == [kind for _, kind in CONTROLS.values()]
