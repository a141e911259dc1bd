"""Whose calls they are: of the second run of a checkpoint, of several forwards of one module, of a module with several names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.dispatch.planned_calls import Target
from meshwright_dtensor.trace.module_stack import FRAMES, install_frames

FIRST, SECOND = Target((None,)), Target(((("tp", 0),),))
RULES = {"block": {None: {"tanh": {0: FIRST, 1: SECOND}}}}


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


class Noise(nn.Module):
    """Keeps the targets of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Target | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame = FRAMES.current()
        self.seen.append(None if frame is None else frame.target(torch.tanh))
        return torch.tanh(x)


class Twice(nn.Module):
    """Calls one module twice, the second time in a checkpoint."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.noise(x).exp(), self.noise(x), use_reentrant=False)  # type: ignore[no-any-return]


def test_forwards_of_one_module_are_told_apart() -> None:
    noise, general = Noise(), Target((None, None))
    model = nn.Sequential(Twice(noise), Twice(noise))
    tables = {None: {"tanh": {0: general}}, 1: {"tanh": {0: FIRST}}, 2: {"tanh": {0: SECOND}}}
    handles = install_frames(model, {"0.noise": tables})
    forward = [general, FIRST, SECOND, general]
    for _ in range(2):
        noise.seen.clear()
        loss = model(torch.ones(2, requires_grad=True)).sum()
        assert noise.seen == forward
        loss.backward()
        # the later block first, each with the number that its call had
        assert noise.seen == [*forward, general, FIRST]
    # in a call of a part there are no others to tell it from
    model[1](torch.ones(2))
    assert noise.seen[-2:] == [general, general]
    for handle in handles:
        handle.remove()
    assert FRAMES.begun is None and not FRAMES.outer and not FRAMES.stack


def test_a_module_inside_by_another_name_has_calls_of_its_own() -> None:
    noise = Noise()
    model = nn.ModuleDict({"first": Twice(noise), "block": Twice(noise)})
    handles = install_frames(model, {"block": {None: {"tanh": {0: FIRST}}}})
    model["block"](torch.ones(2))
    assert noise.seen == [None, None]
    for handle in handles:
        handle.remove()
