"""Take the steps of a script in parallel and on one device, on every rank, and compare all that they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from plan_once import plan_once
from torch import Tensor, nn
from training_zoo import SCRIPTS, Models, Script

import meshwright as mw
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_parallel.verification.compare import compare, one_rounding_away
from meshwright_parallel.verification.report import Comparison, Kind

STEPS = 3
Planner = Callable[[nn.Module, Any, int, dict[str, int]], ParallelPlan]


@dataclass
class Trained:
    """Comparisons of every step, and which parameters of which model are shared between ranks."""

    comparisons: list[Comparison] = field(default_factory=list)
    sharded: list[str] = field(default_factory=list)

    def wrong(self) -> list[str]:
        """What differs from one device, a line each."""
        return [
            f"step {c.step} {c.kind} {c.name}: {c.relative:.1e} of {c.scale:.1e} {c.note}"
            for c in self.comparisons
            if not c.ok
        ]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """A smooth optimizer with a state."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def planned(model: nn.Module, example: Any, world_size: int, degrees: dict[str, int]) -> ParallelPlan:
    """The plan of the planner for pinned degrees."""
    return plan_once(model, example, **degrees)


def by_hand(model: nn.Module, example: Any, world_size: int, degrees: dict[str, int]) -> ParallelPlan:
    """A plan that shards whatever can be, first and last dims by turns; small models would be replicated otherwise."""
    rules = []
    for number, (name, p) in enumerate(model.named_parameters()):
        dims = [d for d in range(p.dim()) if p.shape[d] % degrees["tp"] == 0]
        if dims:
            rules.append(ParameterRule(pattern=name, placement={"tp": f"S({dims[-(number % 2)]})"}))
    return ParallelPlan(world_size=world_size, degrees=degrees, parameters=tuple(rules))


def train(rank: int, world_size: int, name: str, degrees: dict[str, int], planner: Planner) -> Trained:
    """Three steps of `SCRIPTS[name]` against one device."""
    return train_script(SCRIPTS[name], world_size, degrees, planner)


def train_script(
    script: Script,
    world_size: int,
    degrees: dict[str, int],
    planner: Planner,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
) -> Trained:
    """As `train`, for any script; `planner` plans for every model of it."""
    runs: dict[str, Models] = {}
    for run in ("one", "many", "near"):
        torch.manual_seed(3)
        runs[run] = script.models()
    for model in runs["near"].values():
        one_rounding_away(model.parameters())
    result = Trained()
    for key, example in script.examples().items():
        model = runs["many"][key]
        mw.parallelize(model, planner(model, example, world_size, degrees), batch=example)
        parameters = model.named_parameters()
        result.sharded += [f"{key}.{n}" for n, p in parameters if p.to_local().shape != p.shape]
    optimizers = {run: {k: optimizer(m) for k, m in models.items()} for run, models in runs.items()}
    for step in range(STEPS):
        losses: dict[str, dict[str, Tensor | None]] = {}
        ends = []
        for run, models in runs.items():
            torch.manual_seed(40 + step)
            values = script.step(models, optimizers[run], step)
            losses[run] = {str(i): x.detach() for i, x in enumerate(values)}
            ends.append(torch.get_rng_state())
        assert torch.equal(ends[0], ends[1]), "the parallel step drew other random numbers"
        result.comparisons += compare(step, "loss", losses["one"], losses["many"], None)
        result.comparisons += _pairs(step, "gradient", runs)
        for made in optimizers.values():
            for built in made.values():
                built.step()
        result.comparisons += _pairs(step, "parameter", runs)
        result.comparisons += _pairs(step, "buffer", runs)
    return result


def _pairs(step: int, kind: Kind, runs: dict[str, Models]) -> list[Comparison]:
    values = {
        run: {f"{key}.{n}": t for key, m in models.items() for n, t in _tensors(m, kind).items()}
        for run, models in runs.items()
    }
    divided = any(stages_of(model) is not None for model in runs["many"].values())
    return compare(
        step, kind, values["one"], values["many"], None, perturbed=values["near"], actual_only=divided
    )


def _tensors(model: nn.Module, kind: Kind) -> dict[str, Tensor | None]:
    if kind == "buffer":
        return dict(model.named_buffers())
    return {n: p.grad if kind == "gradient" else p for n, p in model.named_parameters()}
