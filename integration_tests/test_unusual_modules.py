"""Modules that read all parameters, have two names, are shared by blocks, draw numbers of their own, fill buffers, communicate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_once import one_and_many, plan_once
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError, PlanError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.one_device import on_one_device

WIDTH, IDS = 8, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x).square().mean()


class ReadsParameters(Chain):
    """As diffusers' and transformers' helpers do for the device and the dtype of a model."""

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        name, _ = next(self.blocks.named_parameters())
        return self.chain(x.to(first.device, first.dtype)).square().mean() * len(name)


class AsksOthers(nn.Module):
    """Its last stage asks a list of modules that are all on the first one, as helpers for positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleList(Block() for _ in range(2))
        self.late = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.early, *self.late):
            first = next(self.early.parameters())
            x = block(x.to(first.device, first.dtype))
        return x.square().mean()


class Takes(Block):
    """Reads its values, and takes what code outside has left for the call."""

    left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.left is not None
        left, self.left = self.left, None
        y: Tensor = super().forward(x)
        return y + left if float(y.detach().sum()) < 1e6 else y


class Leaves(Chain):
    def __init__(self) -> None:
        super().__init__(Takes)
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # no argument of the last blocks
        early = self.before(x)
        for block in self.blocks:
            block.left = early.sin()
            x = block(x)
        return x.square().mean()


class Initialised(Block):
    """Draws where its codes are not initialised, as quantisers do; they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y if self.ready else y[:, torch.randperm(WIDTH)]


class Ready(Chain):
    def __init__(self) -> None:
        super().__init__(Initialised)


class Inner(nn.Module):
    """The only module of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(torch.tanh(self.wide(x)))
        return y.square().mean()


class Counts(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / sum(p.numel() for p in self.parameters())


class Helper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class TwoNames(nn.Module):
    """The same modules under `net` and under `helper.inner`, by which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)))
        self.helper = Helper(self.net)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.helper(x)
        return y.square().mean()


class Sharing(nn.Module):
    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.own, self.common = Block(), common

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own(x) + self.common(x)
        return y


class SharedByBlocks(Chain):
    def __init__(self) -> None:
        common = Block()
        super().__init__()
        self.blocks = nn.ModuleList(Sharing(common) for _ in range(4))


class Diffusion(Chain):
    """A step of the noise for each row, and noise, as diffusion models draw them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        step, noise = torch.randint(0, 10, (x.shape[0],)), torch.randn_like(x)
        return (self.chain(x + noise * self.steps(step)) - noise).square().mean()


class DrawingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + 0.1 * torch.randint(3, (x.shape[0], 1))
        return y + torch.rand(WIDTH)[torch.randperm(WIDTH)]


class Drawing(Chain):
    def __init__(self) -> None:
        super().__init__(DrawingBlock)


class Stacked(torch.autograd.Function):
    """Fills a new tensor, as an adjoint solver does with its states."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            states = torch.empty(2, *x.shape)
            states[0] = x
            states[1] = x * x
        ctx.save_for_backward(x)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        result: Tensor = gradient[0] + 2 * x * gradient[1]
        return result


class Filling(Chain):
    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = Stacked.apply(self.chain(x))
        return states.square().mean()


class OnlyUnit(Helper):
    def __init__(self) -> None:
        super().__init__(Inner())


MODELS = {
    cls.__name__: cls
    for cls in (
        ReadsParameters,
        AsksOthers,
        Leaves,
        Ready,
        OnlyUnit,
        TwoNames,
        SharedByBlocks,
        Diffusion,
        Drawing,
        Filling,
    )
}
PLANS = [{"pp": 2, "microbatches": 1}, {"pp": 2, "microbatches": 2}, {"tp": 2}, {"dp": 2, "zero": 3}]


class Head(nn.Module):
    """Holds the embedding, which the model calls too."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.bias = embedding, nn.Parameter(torch.zeros(IDS))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.t() + self.bias


class TiedByModule(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, WIDTH)
        self.head = Head(self.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.chain(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Positioned(Block):
    def __init__(self, positions: nn.Embedding) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.positions(torch.arange(x.shape[1]))


class PartOfTheFirst(Chain):
    """A module under a name of its own, which the first block alone calls."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.embedding = nn.Embedding(5, WIDTH), nn.Embedding(IDS, WIDTH)
        self.blocks = nn.ModuleList([Positioned(self.positions), *(Block() for _ in range(3))])
        self.out = nn.Linear(WIDTH, IDS)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.out(self.chain(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Normed(Block):
    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class SharedStatistics(Chain):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Normed(norm) for _ in range(4))


def test_statistics_that_stages_would_share_are_refused_when_planning() -> None:
    """Each stage would have statistics of its own calls only."""
    with pytest.raises(PlanError, match="several stages hold it"):
        mw.plan(SharedStatistics(), torch.randn(4, WIDTH), world_size=2, cluster="laptop-cpu", pp=2)


def of_ids(rank: int, size: int, microbatches: int) -> list[tuple[list[float], list[float]]]:
    """Losses of three steps, and sums of the parameters, of one device and in a pipeline."""
    ids = torch.randint(0, IDS, (4, 5), generator=torch.Generator().manual_seed(3))
    pairs = []
    for make in (TiedByModule, PartOfTheFirst):
        pair = []
        for model in one_and_many(lambda make=make: make().double(), ids, pp=size, microbatches=microbatches):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            numbers = []
            for _ in range(3):
                loss = model(ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                numbers.append(loss.item())
            pair.append([*numbers, *(p.detach().sum().item() for p in model.parameters())])
        pairs.append((pair[0], pair[1]))
    return pairs


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parts_of_units_that_have_names_of_their_own(rank_pool: RankPool, microbatches: int) -> None:
    for pairs in rank_pool.run(2, of_ids, microbatches):
        for expected, seen in pairs:
            assert seen == pytest.approx(expected, rel=1e-10, abs=1e-12)


def differences(rank: int, size: int, pins: dict[str, Any]) -> dict[str, list[str]]:
    """Model -> what differs from one device in two steps."""
    wrong: dict[str, list[str]] = {}
    for name, make in MODELS.items():
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
        single, many = one_and_many(make, x, **pins)
        wrong[name] = []
        for step in range(2):
            losses, ends = [], []
            for model in (single, many):
                torch.manual_seed(7 + step)
                loss = model(x)
                loss.backward()
                losses.append(float(loss.detach()))
                ends.append(torch.get_rng_state())
            if losses[1] != pytest.approx(losses[0], rel=1e-5) or not torch.equal(*ends):
                wrong[name].append(f"step {step}: {losses}")
            for (key, p), (_, q) in zip(single.named_parameters(), many.named_parameters(), strict=True):
                assert p.grad is not None
                if q.grad is None or not torch.allclose(q.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-7):
                    wrong[name].append(f"step {step}: gradient of {key}")
                p.grad = None
            many.zero_grad()
    return wrong


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_they_train_as_on_one_device(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for wrong in rank_pool.run(2, differences, pins):
        assert wrong == {name: [] for name in MODELS}


def shared_between_stages(rank: int, size: int) -> list[list[float]]:
    """Losses on one device and in a pipeline, with a write to the shared weight between steps."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    losses = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model: Any = SharedByBlocks()
        if parallel:
            plan = plan_once(model, x, cluster="laptop-cpu", pp=size)
            assert plan.pipeline is not None
            stages = {"stages": (("blocks.[01]",), ("blocks.[23]",))}
            plan = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update=stages)})
            model = mw.parallelize(model, plan, batch=x)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for step in range(3):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
            if not step:
                with torch.no_grad():
                    model.blocks[3].common.linear.weight.mul_(0.1)
        losses.append(seen)
    return losses


def test_a_module_that_stages_share_is_one(rank_pool: RankPool) -> None:
    for expected, seen in rank_pool.run(2, shared_between_stages):
        assert seen == pytest.approx(expected, rel=1e-5)


def counts(rank: int, size: int) -> str:
    try:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
        mw.auto_parallelize(Counts(), x, cluster="laptop-cpu", pp=size)(x)
    except MeshwrightError as error:
        return str(error)
    return ""


def test_going_through_all_parameters_is_refused(rank_pool: RankPool) -> None:
    for message in rank_pool.run(2, counts, timeout=60):
        assert "goes through all parameters of Counts" in message


class Communicating(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        mean = y.detach().mean()
        dist.all_reduce(mean)
        return y - mean / dist.get_world_size()


class Communicates(Chain):
    def __init__(self) -> None:
        super().__init__(Communicating)


def hooked() -> nn.Module:
    model = Chain()
    model.register_full_backward_hook(lambda *_: None)
    return model


def test_hooks_that_stages_would_call_each_are_refused_when_planning() -> None:
    with pytest.raises(PlanError, match="module 'Chain' has a backward hook"):
        mw.plan(hooked(), torch.randn(4, WIDTH), world_size=2, cluster="laptop-cpu", pp=2, dp=1)


def communicates(rank: int, size: int, pins: dict[str, Any]) -> list[float]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    single, model = one_and_many(Communicates, x, **pins)
    return [float(on_one_device(single, x)), float(model(x))]


@pytest.mark.parametrize("pins", [{"pp": 2}, {"tp": 2}, {"dp": 2}], ids=str)
def test_a_planned_model_communicates_as_on_one_device(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for expected, seen in rank_pool.run(2, communicates, pins, timeout=60):
        assert seen == pytest.approx(expected, rel=1e-5)


class DefaultActivation(Block):
    """Its activation is the default of an argument: one module, of all models that are made."""

    def __init__(self, activation: nn.Module = nn.ReLU()) -> None:  # noqa: B008
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


def two_models(rank: int, size: int) -> list[tuple[float, float]]:
    """Losses on one device and on stages of two models, one after the other, that have one module in common."""
    x, losses = torch.ones(4, WIDTH), []
    models = [
        one_and_many(lambda: Chain(DefaultActivation), {"x": x}, pp=2, microbatches=2) for _ in range(2)
    ]
    for single, parallel in models:
        losses.append((float(single(x=x)), float(parallel(x=x))))
    return losses


def test_models_may_share_a_module(rank_pool: RankPool) -> None:
    for losses in rank_pool.run(2, two_models):
        assert all(parallel == pytest.approx(single) for single, parallel in losses)
