"""An optimizer whose states are quantized in blocks, as packages of 8-bit optimizers do it, and a model of odd sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_dtensor.plan import ParameterRule
from meshwright_dtensor.testing.on_device import seeded


class BlockMomentum(torch.optim.Optimizer):
    """Momentum as int8 codes with a scale for each block of elements that follow each other; `numels`: of those."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, block: int = 64) -> None:
        super().__init__(params, {"lr": lr})
        self.block, self.steps = block, 0
        self.numels: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, self.state[p], group["lr"])
        return loss

    def _step(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        assert type(p) in (Tensor, nn.Parameter), "a plain tensor"
        self.numels.append(p.numel())
        count = -(-p.numel() // self.block)
        if not state:
            state.update(codes=torch.zeros(p.shape, dtype=torch.int8), scale=torch.zeros(count), step=0)
        state["step"] += 1
        momentum = self._blocks(state["codes"].to(p.dtype)) * state["scale"][:, None] + self._blocks(p.grad)
        scale = momentum.abs().amax(1) / 127 if count else momentum.new_zeros(0)
        codes = (momentum / scale.clamp(min=1e-12)[:, None]).round()
        state["scale"].copy_(scale)
        state["codes"].copy_(self._values(codes, p))
        p.add_(self._values(codes * state["scale"][:, None], p), alpha=-lr)

    def _blocks(self, x: Tensor) -> Tensor:
        """[blocks, block], with zeros at the end."""
        return F.pad(x.flatten(), (0, -x.numel() % self.block)).view(-1, self.block)

    def _values(self, blocks: Tensor, like: Tensor) -> Tensor:
        return blocks.flatten()[: like.numel()].view(like.shape)


class OddNet(nn.Module):
    """Matrices whose rows are no multiples of blocks, some that are less than one, a convolution and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(100, 130), nn.Linear(130, 100)
        self.even, self.back = nn.Linear(100, 128, bias=False), nn.Linear(128, 65)
        self.out, self.conv = nn.Linear(65, 100), nn.Conv1d(9, 7, 3, padding=1)
        self.back.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        x = self.out(self.back(self.even(x)))
        return self.conv(x.expand(9, *x.shape).transpose(0, 1)).square().mean()


TENSOR_RULES = (
    ParameterRule(pattern="up.*", placement={"tp": "S(0)"}),
    ParameterRule(pattern="down.weight", placement={"tp": "S(1)"}),
    ParameterRule(pattern="even.weight", placement={"tp": "S(0)"}),
)


def inputs(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = seeded(step)
    return torch.randn(12, 100, generator=generator, dtype=torch.float64).to(dtype)


def give_gradients(model: nn.Module, step: int) -> None:
    """The same gradients under every plan."""
    generator = seeded(step)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator)
