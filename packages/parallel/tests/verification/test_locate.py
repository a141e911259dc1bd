"""verify() locates a wrong rule or collective at the first call that shows it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from parallel_models import batch_of, make, plan_of

from meshwright_dtensor.comm import group_calls
from meshwright_dtensor.errors import VerificationError
from meshwright_dtensor.plan import ParameterRule
from meshwright_dtensor.rules.composites.embedding import Embedding
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import VerificationReport, verify

SOUND = group_calls.all_reduce


def _unreduced(t: torch.Tensor, group: Any) -> torch.Tensor:
    """All-reduce that does nothing in the forward pass."""
    backward = torch._C._current_autograd_node() is not None
    return SOUND(t, group) if backward or t.dim() < 2 else t.clone()


def _unreduced_gradient(t: torch.Tensor, group: Any) -> torch.Tensor:
    """All-reduce that does nothing in the backward pass."""
    return t.clone() if torch._C._current_autograd_node() is not None else SOUND(t, group)


def _unmasked(self: Any, ctx: Any) -> Any:
    """A vocabulary-parallel lookup without the mask of ids on other ranks."""
    return lambda tensors: F.embedding(tensors[0] % tensors[1].shape[0], tensors[1])


def faulty(rank: int, world_size: int, how: str) -> VerificationReport:
    rules = {"vocabulary": (ParameterRule(pattern="embed.weight", placement={"tp": "S(0)"}),)}
    changes: dict[str, Any] = {"parameters": rules[how]} if how in rules else {}
    plan = plan_of(degrees={"dp": 1, "tp": 2}, **changes)
    patches = {
        "forward": mock.patch.object(group_calls, "all_reduce", _unreduced),
        "backward": mock.patch.object(group_calls, "all_reduce", _unreduced_gradient),
        "vocabulary": mock.patch.object(Embedding, "local", _unmasked),
    }
    with patches[how]:
        return verify(make, batch_of(rows=4), plan, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "phase", "module", "function"),
    [
        ("forward", "forward", "blocks.0.down", "linear"),
        ("backward", "backward", "blocks.1.norm", "layer_norm"),
        ("vocabulary", "forward", "embed", "embedding"),
    ],
)
def test_fault_is_located(rank_pool: RankPool, how: str, phase: str, module: str, function: str) -> None:
    report = rank_pool.run(2, faulty, how)[0]
    assert not report.ok and report.fault is not None
    assert (report.fault.phase, report.fault.module, report.fault.function) == (phase, module, function)
    assert "tp=" in report.fault.layout and report.fault.inputs
    assert f"{function} #0 in module '{module}'" in report.render().replace("\n", " ")
    assert report.to_dict()["fault"]["module"] == module
    with pytest.raises(VerificationError, match=module.replace(".", r"\.")):
        report.raise_if_bad()


def right(rank: int, world_size: int) -> VerificationReport:
    return verify(make, batch_of(rows=4), plan_of(degrees={"dp": 1, "tp": 2}), steps=1)


def test_right_run_has_no_fault(rank_pool: RankPool) -> None:
    report = rank_pool.run(2, right)[0]
    assert report.ok and report.fault is None and report.to_dict()["fault"] is None
