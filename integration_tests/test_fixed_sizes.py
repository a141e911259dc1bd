"""Models of a fixed number of rows or tokens: planned without the degrees that divide those, which are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.reports.why_not import why_not


class OfSizes(nn.Module):
    """A table says of how many rows and tokens its input is."""

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("table", torch.zeros(rows, tokens, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x + self.table))).square().mean()


@pytest.mark.parametrize("planner", ["eager", "manual", "alpa", "mcmc"])
def test_rows(planner: str) -> None:
    model, x = OfSizes(8, 1), torch.randn(8, 16, 64)

    def degrees(**pins: int) -> dict[str, int]:
        return dict(mw.plan(model, x, cluster="laptop-cpu", world_size=2, planner=planner, **pins).degrees)  # type: ignore[arg-type, union-attr]

    if planner != "manual":
        assert degrees()["tp"] == 2
    assert degrees(tp=2)["tp"] == 2
    with pytest.raises(
        PlanError, match=r"degrees.dp is 2: .*OfSizes raised .* on 0 \(4, 16, 64\); nearest legal: 1"
    ):
        degrees(dp=2)


@pytest.mark.slow
def test_tokens() -> None:
    model, x = OfSizes(1, 4096), torch.randn(2, 4096, 64)
    plan = mw.plan(model, x, cluster="laptop-cpu", world_size=4)
    assert plan.degrees["cp"] == 1  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r"degrees.cp is 2: .*OfSizes raised .* on 0 \(2, 2048, 64\)"):
        mw.plan(model, x, cluster="laptop-cpu", world_size=2, cp=2)
    request = PlanRequest(cluster="laptop-cpu", world_size=4)
    assert "a rank's part of the batch" in str(why_not(plan, model, x, request, {"cp": 2}))  # type: ignore[arg-type]


def test_a_model_that_does_not_run_at_all_is_no_matter_of_degrees() -> None:
    with pytest.raises(UsageError, match=r"called with this batch .* check that model") as caught:
        mw.plan(OfSizes(1, 4096), torch.randn(2, 2048, 64), cluster="laptop-cpu", world_size=2)
    assert not isinstance(caught.value, PlanError)
