"""Bytes of tensors that are alive in a real step on one rank: what tests hold predictions against."""

from __future__ import annotations

import torch
from torch import nn

from meshwright_planner.calibration.live_bytes import Counting


def counted(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Most bytes at once in the second step of AdamW."""
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [x for entries in optimizer.state.values() for x in entries.values()]
    with Counting([*model.parameters(), *model.buffers(), *states]) as counting:
        step()
        counting.restart()
        step()
        return counting.peak
