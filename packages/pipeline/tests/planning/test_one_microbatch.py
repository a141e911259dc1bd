"""Models whose units combine all rows are planned with one microbatch, and the plan says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipe_models import Chain
from torch import Tensor, nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.strategy import Link, ModuleWork, PipelineQuery, SearchRequest, StrategyCost
from meshwright_pipeline.strategy import Pipeline

LINK = Link("test", 1e-6, 1e9)


class Normed(nn.Module):
    def __init__(self, tracks: bool = True) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(4, track_running_stats=tracks) for _ in range(4)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh()) for norm in norms)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def asked(model: nn.Module, **options: object) -> SearchRequest:
    work = tuple(ModuleWork(f"layers.{i}", 1.0, 64.0) for i in range(4))
    return SearchRequest(
        2, 8, options=options, survey=Pipeline().survey(model), pipeline=PipelineQuery(work=work)
    )


class Pair(nn.Module):
    """One encoder, called twice: the only module that can be placed on a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)

    def forward(self, first: Tensor, other: Tensor) -> Tensor:
        return (self.encoder(first) - self.encoder(other)).square().mean()


def cost(request: SearchRequest) -> StrategyCost:
    return Pipeline().cost(request, 2, LINK)


def test_batch_statistics_need_one_microbatch() -> None:
    request = asked(Normed(), schedule="1f1b")
    assert [way["microbatches"] for way in Pipeline().ways(request, 2)] == [1]
    result = cost(request)
    (note,) = result.notes
    assert result.fields["pipeline"]["microbatches"] == 1
    assert "one microbatch, so that its ranks compute one after the other" in note
    assert "module 'layers.0.1' normalises by the whole batch" in note
    with pytest.raises(PlanError, match=r"'layers.0.1' normalises by the whole batch.*eval\(\).*legal: 1"):
        cost(asked(Normed(), schedule="1f1b", microbatches=4))
    # it uses running statistics
    still = cost(asked(Normed().eval(), schedule="1f1b", microbatches=4))
    assert not still.notes and still.fields["pipeline"]["microbatches"] == 4
    untracked = cost(
        asked(Normed(tracks=False).eval(), schedule="1f1b")
        # without running statistics it uses those of the batch, in eval() too
    )
    assert untracked.notes and untracked.fields["pipeline"]["microbatches"] == 1


def test_scalars_from_units_need_one_microbatch() -> None:
    request = replace(
        asked(Chain(), schedule="1f1b"),
        pipeline=replace(
            asked(Chain(), schedule="1f1b").pipeline, scalar_flows=frozenset({("layers.0", "")})
        ),
    )
    assert [way["microbatches"] for way in Pipeline().ways(request, 2)] == [1]
    (note,) = cost(request).notes
    assert "one microbatch" in note and "module 'layers.0' computes a scalar from its rows" in note
    assert not cost(asked(Chain(), schedule="1f1b")).notes


def test_impossible_degree_has_a_reason() -> None:
    request = SearchRequest(2, 8, survey=Pipeline().survey(Pair()))
    assert list(Pipeline().degrees(request)) == [1]
    told = Pipeline().refusal(request, 2)
    assert told is not None and "this model has 1 that can be placed on a stage (encoder)" in told
    assert "Keep layers in such lists, or use a smaller degree" in told
    few = SearchRequest(4, 2, survey=Pipeline().survey(Chain()))
    assert list(Pipeline().degrees(few)) == [1, 2]
    told = Pipeline().refusal(few, 4)
    assert told is not None and "has 2 rows. Use more rows" in told
    assert Pipeline().refusal(few, 3) is None  # 3 does not divide 4 ranks: the general error applies
