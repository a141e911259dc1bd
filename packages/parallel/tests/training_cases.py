"""A small model, and its training in parallel and on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.on_device import seeded
from meshwright_parallel import parallelize
from meshwright_parallel.verification.compare import compare, one_rounding_away


class Net(nn.Module):
    """Parameters of every kind: a table, matrices, vectors, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up = nn.Embedding(12, 16), nn.Linear(16, 32)
        self.norm, self.down = nn.LayerNorm(32), nn.Linear(32, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.gelu(self.up(self.emb(ids))))) * self.scale


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank part (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.t()) @ self.b.t() * 2.0


def adapted() -> nn.Module:
    """`Net`, frozen, with two adapted linears."""
    model = Net().requires_grad_(False)
    model.up, model.down = Adapted(model.up), Adapted(model.down)  # type: ignore[assignment]
    return model


class Lion(optim.Optimizer):
    """A user's optimizer, written for plain tensors."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                average, (b1, b2) = state["exp_avg"], group["betas"]
                p.add_(average.clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_(), alpha=-group["lr"])
                average.mul_(b2).add_(p.grad, alpha=1 - b2)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "adamw": lambda ps: optim.AdamW(ps, lr=1e-3),
    "adamw-loop": lambda ps: optim.AdamW(ps, foreach=False, amsgrad=True),
    "adamw-fused": lambda ps: optim.AdamW(ps, fused=True),
    "sgd-nesterov": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda ps: optim.Adafactor(ps),
    "adagrad-fused": lambda ps: optim.Adagrad(ps, fused=True),
    "rmsprop": lambda ps: optim.RMSprop(ps, momentum=0.5, centered=True),
    "rprop": lambda ps: optim.Rprop(ps),
    "lion": Lion,
    "lbfgs": lambda ps: optim.LBFGS(ps, lr=0.1, max_iter=3),
}


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of the batch of a step."""
    generator = seeded(step)
    ids, labels = (torch.randint(n, (4, 5), generator=generator) for n in (12, 6))
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def plan_of(model: nn.Module, degrees: dict[str, int]) -> ParallelPlan:
    """Shards whatever can be on `tp`, first and last dims by turns."""
    rules = []
    for number, (name, p) in enumerate(model.named_parameters()):
        dims = [d for d in range(p.dim()) if p.shape[d] % degrees["tp"] == 0]
        if dims:
            rules.append(ParameterRule(pattern=name, placement={"tp": f"S({dims[-(number % 2)]})"}))
    world_size = degrees["dp"] * degrees["tp"]
    return ParallelPlan(world_size=world_size, degrees=degrees, parameters=tuple(rules))


def pair(
    degrees: dict[str, int], make: Callable[[], nn.Module] = Net, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """The model on one device, and the same in parallel."""
    torch.manual_seed(seed)
    single = make()
    torch.manual_seed(seed)
    many = make()
    return single, parallelize(many, plan_of(many, degrees))


def differences(single: nn.Module, many: nn.Module, kind: str = "parameter") -> list[str]:
    """Parameters or gradients that differ from one device."""
    tensors = [
        {n: p.grad if kind == "gradient" else p for n, p in m.named_parameters()} for m in (single, many)
    ]
    return [f"{c.name} {c.relative:.1e} {c.note}" for c in compare(0, "gradient", *tensors, None) if not c.ok]


def states(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors in an optimizer's state, by parameter name and key."""
    return {
        f"{name}/{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    }


def train(runs: Iterable[tuple[nn.Module, optim.Optimizer]], steps: Iterable[int]) -> None:
    """The usual loop, for each model."""
    for step in steps:
        for model, optimizer in runs:

            def closure(
                model: nn.Module = model, optimizer: optim.Optimizer = optimizer, step: int = step
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)


def optimizers(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, list[str]]:
    """Three steps of each optimizer: parameters and states that differ by more than 1e-5, and by more than one rounding of
    the initial weights causes on one device.
    """
    results = {}
    for name, make in OPTIMIZERS.items():
        single, many = pair(degrees)
        perturbed = copy.deepcopy(single)
        one_rounding_away(perturbed.parameters())
        runs = [(model, make(list(model.parameters()))) for model in (single, many, perturbed)]
        train(runs, range(3))
        problems: list[str] = []
        for kind in ("parameter", "state"):
            values = [dict(m.named_parameters()) if kind == "parameter" else states(m, o) for m, o in runs]
            noise = {c.name: c.difference for c in compare(0, "gradient", values[0], values[2], None)}
            for c in compare(0, "gradient", values[0], values[1], None):
                # a line search amplifies rounding on one device too
                if not c.ok and not (name == "lbfgs" and c.difference <= 4 * noise[c.name]):
                    problems.append(f"{kind} {c.name} {c.relative:.1e} {c.note}")
        results[name] = problems
    return results
