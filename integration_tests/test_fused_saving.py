"""What fusing saves: traffic between operations that stream, and never a product."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright_planner.clusters.registry import DGX_H100
from meshwright_planner.trace.batch import Batch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "packages" / "planner" / "tests"))
from fused_saving import fused_saving
from planner_models import Attention

FREE = replace(DGX_H100, launch_s=0.0, launch_backward_s=0.0, host_s=0.0)
ROWS, WIDTH = 4096, 4096
ONCE = 4 * ROWS * WIDTH / FREE.streams
"""Seconds that a tensor of the batch takes to be read or written."""


def saved(model: nn.Module) -> float:
    return fused_saving(model, Batch.of(torch.empty(ROWS, WIDTH, device="meta")), FREE)


class Chain(nn.Module):
    """Streaming operations alone, or with a layer between them that ends the kernel."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.between = nn.Linear(WIDTH, WIDTH) if between else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(torch.tanh(self.between(torch.tanh(F.silu(x * self.scale)))))


def test_fused_kernel_reads_and_writes_once() -> None:
    with torch.device("meta"):
        whole, cut = Chain(between=False), Chain(between=True)
    # five operations of a read and a write each; back, a function reads a gradient and what is kept and writes one, and the
    # scaling writes none; one kernel reads and writes once, and back reads the gradient and its input again
    assert saved(whole) == pytest.approx((5 * 2 + 4 * 3 + 2 - 2 - 2) * ONCE, rel=1e-6)
    # a linear layer is no part of a kernel: three operations before it, two after it, which return a gradient to it
    before, after = 3 * 2 + 2 * 3 + 2 - 2 - 2, 2 * 2 + 2 * 3 - 2 - 3
    assert saved(cut) == pytest.approx((before + after) * ONCE, rel=1e-6)


def test_products_save_nothing_by_fusion() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        attention, x = Attention(256, 4), torch.empty(2, 512, 256)
    assert saved(layers) == 0.0
    # moving heads is all that is left of attention to fuse, and views move nothing
    streamed = 4 * x.numel() / FREE.streams
    assert fused_saving(attention, Batch.of(x), FREE) <= 3 * 2 * streamed
