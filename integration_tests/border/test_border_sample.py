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
from .registry import all_keys
from .subjects import PLANS, Subject
from .sweep import sweep
from .table import page

FINE = ("equal", "refused", "same error", "not tried")


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(PLANS))
def test_a_sample_is_as_on_one_device_or_refused(rank_pool: RankPool, plan: str) -> None:
    outcomes = list(sweep(all_keys()[::400], [plan], rank_pool))
    assert len(outcomes) > 12
    assert [each for each in outcomes if each.kind not in FINE] == []
    assert f"| torch.Tensor | {plan} |" in page(outcomes)


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
