"""The small model of the sweep, its plans, and the state in which a case finds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, PipelineRule

RULES = {"a.weight": "S(0)", "a.bias": "S(0)", "b.weight": "S(1)", "c.weight": "S(0)", "c.bias": "S(0)"}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"degrees": {"dp": 2}},
    "tp2": {
        "degrees": {"dp": 1, "tp": 2},
        "parameters": tuple(
            ParameterRule(pattern=key, placement={"tp": rule}) for key, rule in RULES.items()
        ),
    },
    "zero3": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
    "pp2": {
        "degrees": {"pp": 2, "dp": 1},
        "pipeline": PipelineRule(stages=(("emb", "a"), ("b", "c")), microbatches=2),
    },
}
LOOP_PLANS: dict[str, dict[str, Any]] = {
    "tp2 x zero3": PLANS["tp2"] | PLANS["zero3"] | {"degrees": {"tp": 2, "zero": 2}},
    "pp2 x dp2": PLANS["pp2"] | {"degrees": {"pp": 2, "dp": 2}},
    "pp2 x tp2": PLANS["tp2"] | PLANS["pp2"] | {"degrees": {"pp": 2, "dp": 1, "tp": 2}},
    "pp2 x zero2": PLANS["pp2"] | {"degrees": {"pp": 2, "zero": 2}, "zero": {"stage": 2}},
}
"""Plans of four ranks, for what is written around the loop of training."""
SETUPS = ("bare", "backward", "optimizer")


class Scaled(nn.Linear):
    """A layer of 8 features, with a buffer that scales its inputs."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Small(nn.Module):
    """An embedding and three layers, with weights of shapes [12, 8], [12, 8], [8, 12] and [8, 8], and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.a = nn.Linear(8, 12)
        self.b = nn.Linear(12, 8)
        self.c = Scaled()

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.b(torch.relu(self.a(self.emb(ids))))
        result: Tensor = self.c(h)
        return result


@dataclass
class Subject:
    """A model, on one device or in parallel.

    setup: "bare", "backward" (there are gradients) or "optimizer" (there are states of AdamW too). plan: of the case, also on
    one device.
    """

    model: Any
    setup: str
    plan: str = ""
    optimizer: Any = None

    @property
    def ids(self) -> Tensor:
        """Tokens of shape [4, 5]: a plain tensor, which is the global value."""
        return torch.arange(20).reshape(4, 5) * 7 % 12

    def activation(self) -> Any:
        """What the model returns: shape [4, 5, 8]."""
        return self.model(self.ids)

    def loss(self) -> Any:
        """A number."""
        return self.activation().square().mean()

    def step(self) -> list[Any]:
        """One step of training by hand: the loss and the gradients."""
        self.model.zero_grad()
        loss = self.loss()
        loss.backward()
        values = [loss.detach(), *(p.grad for p in self.model.parameters())]
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
        return values


def world_of(plan: str) -> int:
    """Its ranks."""
    return math.prod((PLANS | LOOP_PLANS)[plan]["degrees"].values())


def subject(plan: str, setup: str, parallel: bool) -> Subject:
    """A fresh model: of one device, or by this plan of `PLANS` (a collective call)."""
    torch.manual_seed(0)
    made = Subject(Small(), setup, plan)
    if parallel:
        mw.parallelize(made.model, ParallelPlan(world_size=world_of(plan), **(PLANS | LOOP_PLANS)[plan]))
    if setup == "optimizer":
        made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=0.01)
        made.loss().backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
    if setup != "bare":
        made.loss().backward()
    return made


def tensors(made: Subject) -> dict[str, Any]:
    """The parameters, buffers, gradients and optimizer states, by name."""
    values: dict[str, Any] = {f"parameter {name}": p for name, p in made.model.named_parameters()}
    values |= {f"buffer {name}": b for name, b in made.model.named_buffers()}
    values |= {f"gradient {name}": p.grad for name, p in made.model.named_parameters()}
    if made.optimizer is not None:
        for i, group in enumerate(made.optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                values |= {f"state {i}.{j}.{key}": x for key, x in made.optimizer.state.get(p, {}).items()}
    return values
