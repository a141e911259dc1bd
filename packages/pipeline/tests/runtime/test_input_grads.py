"""Gradients of the inputs of a pipelined model are those of one device, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipe_models import Crossed, crossed_batch
from torch import Tensor, nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline

LIMIT = 1e-5


def plan(stages: list[list[str]], **changes: Any) -> ParallelPlan:
    rule: dict[str, Any] = {"stages": stages, "microbatches": 4, "loss": "batch"} | changes
    return ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=PipelineRule(**rule))


def crossed(schedule: str) -> ParallelPlan:
    parts = [["encoder"], ["start", "decoder.0"], ["decoder.1"], ["decoder.[23]", "head"]]
    stages = (
        parts
        if schedule == "interleaved" or schedule.startswith("z")
        else [parts[0] + parts[1], parts[2] + parts[3]]
    )
    return plan(stages, schedule=schedule)


class Mixed(nn.Module):
    """Every stage, and the code after the units, uses the inputs, and all use a vector without rows."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.crossed, self.inside = Crossed(), inside

    def forward(self, x: Tensor, y: Tensor, shift: Tensor) -> Any:
        x = x.clone().mul_(1.5) + shift
        loss, out = self.crossed(x, y)
        weighted = out * torch.sigmoid(y) + shift * 0.1
        return loss + weighted.square().mean() if self.inside else weighted


def far(value: Tensor | None, reference: Tensor | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else float("inf")
    return float((value - reference).abs().max() / reference.abs().max())


def train(rank: int, size: int, schedule: str, inside: bool) -> float:
    """Largest distance of a gradient from one device: of inputs that are leaves, and of the module that made one."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return Mixed(inside)

    pipeline_plan = plan(
        [[f"crossed.{p}" for p in stage] for stage in crossed(schedule).pipeline.stages], schedule=schedule
    )
    single, many = built(), pipeline(built(), pipeline_plan)
    worst = 0.0
    for step in range(2):
        results = []
        for model in (single, many):
            batch = crossed_batch()
            torch.manual_seed(step)
            maker = nn.Linear(batch["y"].shape[1], batch["y"].shape[1])
            x = batch["x"].requires_grad_()
            shift = torch.linspace(-1, 1, x.shape[1])[None].requires_grad_()
            out = model(x, maker(batch["y"]), shift)
            loss = out if inside else F.mse_loss(out, torch.ones_like(out))
            (2.0 * loss).backward()
            results.append((x.grad, shift.grad, maker.weight.grad, loss.detach()))
        worst = max(worst, *(far(b, a) for a, b in zip(*results, strict=True)))
        single_parameters = dict(single.named_parameters())
        worst = max(
            worst,
            *(far(p.grad, single_parameters[name].grad) for name, p in many.named_parameters()),
        )
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_input_gradients_match_one_device(rank_pool: RankPool, schedule: str, inside: bool) -> None:
    for worst in rank_pool.run(2, train, schedule, inside, timeout=200):
        assert worst < LIMIT


class Fake(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, inner), nn.Linear(inner, outer)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def alternate(rank: int, size: int, detach: bool) -> tuple[float, float]:
    """A generator and a critic, both pipelined: distance of losses and of parameters from one device."""
    runs = []
    for parallel in (False, True):
        torch.manual_seed(0)
        models = [Fake(10, 6), Fake(12, 1)]
        if parallel:
            models = [pipeline(m, plan([["layers.0"], ["layers.1"]], microbatches=2)) for m in models]  # type: ignore[misc]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            noise, real = (torch.randn(4, 6, generator=generator) for _ in range(2))
            fake = models[0](noise)
            critic_loss = F.softplus(models[1](fake.detach())).mean() + F.softplus(-models[1](real)).mean()
            optimizers[1].zero_grad()
            critic_loss.backward()
            optimizers[1].step()
            if detach and parallel:  # the negative control: the generator gets no gradient
                fake = fake.detach() + 0.0 * fake
            generator_loss = F.softplus(-models[1](fake)).mean()
            optimizers[0].zero_grad()
            generator_loss.backward()
            optimizers[0].step()
            losses += [float(critic_loss), float(generator_loss)]
        runs.append((models, torch.tensor(losses)))
    (single_models, losses_of_one), (pipelined_models, losses_of_many) = runs
    worst = 0.0
    for whole, part in zip(single_models, pipelined_models, strict=True):
        single_parameters = dict(whole.named_parameters())
        worst = max(
            worst,
            *(far(p.detach(), single_parameters[name].detach()) for name, p in part.named_parameters()),
        )
    return float((losses_of_one - losses_of_many).abs().max()), worst


@pytest.mark.slow
def test_two_pipelined_models_train_each_other(rank_pool: RankPool) -> None:
    for losses, parameters in rank_pool.run(2, alternate, False, timeout=150):
        assert losses < LIMIT and parameters < LIMIT
    for losses, _ in rank_pool.run(2, alternate, True, timeout=150):
        assert losses > 1e-3


class Penalised(nn.Module):
    """Differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = Fake(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.fake(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + slope.square().mean()


def refuse(rank: int, size: int) -> list[str]:
    """Errors of gradients of gradients, of inputs and of parameters, and the warning of a step with a loss inside."""
    messages = []
    batch = crossed_batch()
    model = pipeline(Crossed(), crossed("1f1b"))
    x = batch["x"].requires_grad_()
    with pytest.raises(UnsupportedError) as error:
        torch.autograd.grad(model(x, batch["y"])[0], x, create_graph=True)
    messages.append(str(error.value))
    model = pipeline(Crossed(), plan(crossed("1f1b").pipeline.stages, loss="microbatches"))
    with pytest.raises(UnsupportedError) as error:
        model(**crossed_batch())[0].backward(create_graph=True)
    messages.append(str(error.value))
    inside = pipeline(Penalised(), plan([["fake.layers.0"], ["fake.layers.1"]], microbatches=2))
    with pytest.raises(UnsupportedError) as error:
        inside(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    messages.append(str(error.value))
    if rank == 0:
        with pytest.warns(UserWarning, match="schedule '1f1b' of this pipeline is lost.*x.detach") as seen:
            model(x, batch["y"])
        messages.append(str(seen[0].message))
    else:
        model(x, batch["y"])
        messages.append("")
    return messages


@pytest.mark.slow
def test_double_backward_is_refused(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, refuse, timeout=150)
    for told in (*first[:2], *second[:2]):
        assert "create_graph=True through a pipelined model" in told and "plan without pp" in told
    for told in (first[2], second[2]):
        assert (
            "forward of this Penalised calls torch.autograd.grad or backward" in told
            and "plan without pp" in told
        )
    assert "an input of the model requires a gradient" in first[3]
