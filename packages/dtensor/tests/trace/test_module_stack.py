"""Checkpointing that a model does inside of a forward: the second run belongs to the module whose forward it is in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.dispatch.planned_calls import Target
from meshwright_dtensor.trace.module_stack import FRAMES, install_frames

FIRST, SECOND = Target((None,)), Target(((("tp", 0),),))
RULES = {"block": {"tanh": {0: FIRST, 1: SECOND}}}


class Block(nn.Module):
    """One planned call before what is checkpointed, one in it; it keeps whose calls those were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str | None, Target | None]] = []

    def look(self) -> None:
        frame = FRAMES.current()
        self.seen.append((None, None) if frame is None else (frame.module, frame.target(torch.tanh)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return checkpoint(self.work, x, use_reentrant=False)  # type: ignore[no-any-return]

    def work(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return torch.tanh(x).exp()


@pytest.mark.parametrize("passes", [1, 2])
def test_recomputed_part_has_targets_of_first_run(passes: int) -> None:
    block = Block()
    handles = install_frames(nn.ModuleDict({"block": block}), RULES)
    loss = block(torch.ones(2, requires_grad=True)).sum()
    for _ in range(passes):
        loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    assert block.seen == [("block", FIRST)] + [("block", SECOND)] * (1 + passes)
    assert not FRAMES.stack


def test_checkpointing_without_plan_is_unchanged() -> None:
    block = Block()
    block(torch.ones(2, requires_grad=True)).sum().backward()
    assert block.seen == [(None, None)] * 3
