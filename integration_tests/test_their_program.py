"""What a published program spends beyond a plan: ends of recomputed blocks, and work that no rank divides."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright_planner.clusters.registry import DGX_H100
from meshwright_planner.trace.batch import Batch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from fused_saving import OneRank
from their_program import Group, TheirProgram

FREE = replace(DGX_H100, launch_s=0.0, launch_backward_s=0.0, host_s=0.0)
ROWS, LENGTH, WIDTH = 4, 1024, 1024
NBYTES = 4 * ROWS * LENGTH * WIDTH


class Block(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q_norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.q_norm(self.first(x)) * 2)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def program(
    degree: int, recompute: str | None = "full", sequence: bool = True
) -> tuple[TheirProgram, OneRank]:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(ROWS, LENGTH, WIDTH, requires_grad=True)
    rank = OneRank.of(model, Batch.of(x), FREE)
    return TheirProgram(rank, model, recompute, Group(FREE.link(1, degree), degree, sequence)), rank


def forward(rank: OneRank, module: str, name: str) -> float:
    """Seconds of the forward pass of an operation of the first block."""
    indices = (i for i, n in enumerate(rank.tape.nodes) if n.module == f"layers.0{module}" and name in n.name)
    seconds, fraction = rank.timed(next(indices))
    return seconds * fraction


@pytest.mark.parametrize("sequence", [True, False])
def test_ends_are_the_last_product_and_its_sum_over_ranks(sequence: bool) -> None:
    ours, rank = program(2, sequence=sequence)
    end = forward(rank, ".last", "linear") + forward(rank, "", "add")
    kind, copied = ("reduce_scatter", 2 * NBYTES / FREE.streams) if sequence else ("all_reduce", 0.0)
    summed = FREE.link(1, 2).seconds(kind, NBYTES, 2) + copied
    assert ours.ends() == pytest.approx(2 * (end / 2 + summed))
    assert program(1)[0].ends() == pytest.approx(2 * end)
    assert program(2, recompute=None)[0].ends() == 0.0


def test_what_follows_a_gather_is_not_divided_in_both_forward_passes() -> None:
    ours, rank = program(4)
    gather = FREE.link(1, 4).seconds("all_gather", NBYTES, 4) + 2 * NBYTES / FREE.streams
    whole = 3 / 4 * forward(rank, "", "mul")
    assert ours.undivided(("q_norm",)) == pytest.approx(2 * 2 * (gather + whole))
    assert program(4, recompute=None)[0].undivided(("q_norm",)) == pytest.approx(2 * (gather + whole))
    assert ours.undivided(("no_such_norm",)) == 0.0
