"""Pictures of models under every kind of plan: what each rank holds, sends and keeps alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        # tied over the stages of a pipeline
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).square().mean()


def pictures(rank: int, _world_size: int, pins: dict[str, Any]) -> tuple[str, str, str, int]:
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    model = mw.auto_parallelize(Net(), x, **pins)
    with mw.debug.communication() as log, mw.debug.memory() as timeline:
        model(x).backward()
    assert "<table" in model.parallel_plan._repr_html_() and "<svg" in timeline._repr_html_()
    if "pp" in pins:
        other = next(p for p in model.parameters() if not p.to_local().numel())
        assert f"held by rank {1 - rank} of pp" in str(mw.debug.visualize(other))
    return str(mw.debug.visualize(model)), str(log), str(timeline), timeline.peak.nbytes


def row_of(picture: str, name: str) -> list[str]:
    return next(line for line in picture.splitlines() if line.strip().startswith(name)).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "shown", "axis"),
    [
        ({"tp": 2}, "tp S(0) [32, 16]", "tp"),
        ({"zero": 3}, "zero S(0) [32, 16]", "zero"),
        ({"dp": 2}, "whole [64, 16]", "dp"),
    ],
)
def test_a_picture_of_a_parallel_model(
    rank_pool: RankPool, pins: dict[str, Any], shown: str, axis: str
) -> None:
    for picture, log, timeline, peak in rank_pool.run(2, pictures, pins):
        cells = row_of(picture, "layers.*.0.weight")
        assert cells[1] == "4" and " ".join(cells).endswith(shown)
        assert axis in {line.split()[0] for line in log.splitlines() if line.strip()}
        assert "at most" in timeline and peak > 8 * WIDTH * 4


@pytest.mark.slow
def test_a_picture_of_a_pipeline_says_where_the_other_stages_are(rank_pool: RankPool) -> None:
    for rank, (picture, *_) in enumerate(rank_pool.run(2, pictures, {"pp": 2})):
        rows = [" ".join(line.split()) for line in picture.splitlines() if "layers.*.0.weight" in line]
        held = [row for row in rows if row.endswith("[64, 16]")]
        elsewhere = [row for row in rows if row.endswith(f"nothing: on rank {1 - rank} of pp")]
        assert len(held) == len(elsewhere) == 1, picture
        # a parameter that both stages hold
        assert row_of(picture, "first.weight")[-2:] == ["[16,", "16]"]
