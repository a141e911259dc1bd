"""What users do with `model.parameters()` around the loop gives the values of one device, under a pipeline too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from plan_once import one_and_many, plan_once
from torch import Tensor, nn
from training_zoo import Swish

import meshwright as mw
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.stages.stage_tensor import StageValue, value_of
from meshwright_dtensor.stages.whole_model import own_stages, whole_model_of
from meshwright_dtensor.testing.rank_pool import RankPool

PLANS = {
    "pp": (2, {"pp": 2}),
    "pp-tp": (4, {"pp": 2, "tp": 2}),
    "pp-zero2": (4, {"pp": 2, "dp": 2, "zero": 2}),
    "pp3": (3, {"pp": 3}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp": (2, {"tp": 2}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6)
        self.register_buffer("scale", torch.tensor([0.5, 0.25, 1.0, 2.0, 0.75, 1.5]))
        self.register_buffer("used", torch.zeros(6))
        self.register_buffer("places", torch.arange(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # assigned, not written to
        self.used = 2 * self.scale
        scaled: Tensor = self.norm(x) * self.scale
        return x + self.down(torch.tanh(self.up(scaled)))


class Model(nn.Module):
    """Four blocks between an embedding and a head that share a weight, and a number that no block has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batch() -> dict[str, Tensor]:
    ids = torch.arange(20).reshape(4, 5) * 7 % 11
    return {"ids": ids, "labels": ids.roll(1, 0)}


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(**batch())["loss"]
    loss.backward()
    return loss


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


# ---- what users do: each gives values to compare, and may change the model
def facts(model: nn.Module) -> Iterator[Any]:
    yield [
        (name, tuple(p.shape), p.dtype, p.numel(), p.requires_grad) for name, p in model.named_parameters()
    ]
    yield [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    yield sum(p.numel() for p in model.parameters())
    yield [(name, tuple(value.shape), value.tolist()) for name, value in model.named_buffers()]


def norms(model: nn.Module) -> Iterator[Any]:
    yield sum(p.detach().square().sum() for p in model.parameters()).sqrt().item()
    yield max(p.detach().abs().max() for p in model.parameters())
    backward(model)
    yield torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    yield torch.stack([g.norm() for g in gradients(model)])
    yield torch.nn.utils.get_total_norm(gradients(model), norm_type=1.0)
    yield torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    yield from gradients(model)
    yield torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    yield mw.clip_grad_norm_(model.parameters(), 0.02)
    yield from gradients(model)


def penalty(model: nn.Module) -> Iterator[Any]:
    """L2 of all parameters, in the loss and alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch())["loss"] + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        yield loss.item()
        yield from gradients(model)
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    sum(p.abs().sum() for p in model.blocks[3].parameters()).backward()
    yield from gradients(model)
    yield from torch.autograd.grad(
        sum(p.square().sum() for p in model.parameters()), list(model.parameters())
    )
    yield from torch.autograd.grad(model(**batch())["loss"], list(model.parameters()))


def initialisation(model: nn.Module) -> Iterator[Any]:
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    yield torch.rand(2)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.kaiming_uniform_(p)
            nn.init.orthogonal_(p)
        elif "bias" in name:
            nn.init.zeros_(p)
    yield torch.rand(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    yield torch.rand(2)


def average(model: nn.Module) -> Iterator[Any]:
    averages = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(2):
        backward(model)
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                averages[name].mul_(0.9).add_(value, alpha=0.1)
            for name, p in model.named_parameters():
                averages[name].lerp_(p.detach(), 0.01)
    yield from averages.values()
    # of the values that computations take, and the stored ones
    mixed = {name: 0.9 * p.clone().detach() + 0.1 * p.data for name, p in model.named_parameters()}
    yield [tuple(value.shape) for value in mixed.values()]
    yield from mixed.values()
    model.load_state_dict(averages)
    model.load_state_dict({name: value * 2 for name, value in Model().state_dict().items()}, strict=True)


def vectors(model: nn.Module) -> Iterator[Any]:
    vector = nn.utils.parameters_to_vector(model.parameters())
    yield vector
    nn.utils.vector_to_parameters(vector.detach() * 1.5 + 0.1, model.parameters())
    backward(model)
    flat = torch.cat([g.flatten() for g in gradients(model)])
    yield flat
    place = 0
    for p in model.parameters():
        p.grad = (flat[place : place + p.numel()] * 2).view_as(p)
        place += p.numel()
    yield from gradients(model)


def reading(model: nn.Module) -> Iterator[Any]:
    for p in model.parameters():
        yield f"{p.detach().mean():.3f}"
        yield p.detach().cpu().numpy().sum().item()
        yield p.detach().flatten()[:2].tolist()
        yield bool((p > 0).any()), torch.equal(p, p.clone()), p.max().item(), len(p), p.stride()
        yield (p.detach() > 0).nonzero()
    first, last = model.blocks[0].up.weight, model.blocks[3].up.weight
    yield first.detach() @ last.detach().T
    yield torch.allclose(first, last)
    yield first.detach().std(), torch.aminmax(last.detach())[1]
    yield [float(x) for x in torch._foreach_norm([p.detach() for p in model.parameters()])]


def writing(model: nn.Module) -> Iterator[Any]:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.4, 0.4)
            p[p < 0] = 0.1
            p.data = p.data * 0.5
            p.data.mul_(3)
            p[p > 0.1] *= 2
        model.blocks[3].up.weight.copy_(model.blocks[0].up.weight)
        model.blocks[0].down.weight[0] = model.blocks[3].down.weight[1]
        torch._foreach_mul_(list(model.parameters()), 0.9)
        torch._foreach_add_(
            list(model.parameters()), [p.detach().clone() for p in model.parameters()], alpha=0.1
        )
    yield None


def frozen(model: nn.Module) -> Iterator[Any]:
    """All of one stage frozen: the optimizer has parameters on every rank."""
    model.blocks[2:].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    yield len(optimizer.param_groups[0]["params"])
    for _ in range(2):
        backward(model)
        optimizer.step()
        yield [g is None for g in gradients(model)]
        optimizer.zero_grad()


class WithGlobalNorm(torch.optim.Optimizer):
    """Signs of averaged gradients, which are scaled by the norm of all of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in parameters))
        for p in parameters:
            if not self.state[p]:
                self.state[p]["average"] = torch.zeros_like(p)
            average = self.state[p]["average"].mul_(0.9).add_(p.grad / norm, alpha=0.1)
            p.add_(average, alpha=-self.param_groups[0]["lr"])


def repeated(model: nn.Module) -> Iterator[Any]:
    """Calls whose ranks once decided differently: operands twice, fills, draws of values, autocast, plain members of lists."""
    weights = [block.up.weight for block in model.blocks]
    for p in weights:
        yield (p * p).sum().item(), nn.functional.mse_loss(p, p * 0).item()
        nn.init.trunc_normal_(p, std=0.1)
        with torch.no_grad():
            p.add_(p).uniform_(0, 1).mul_(0.5)
    yield [torch.bernoulli(p.detach().clamp(0, 1)).sum() for p in weights]
    for rate in (0.0, 0.5):
        yield [nn.functional.dropout(p.detach(), rate).sum() for p in weights]
    yield torch.rand(2)
    with torch.inference_mode():
        yield [p.square().mean().item() for p in weights]
    yield [(p.detach() * p.detach().square().mean()).sum().item() for p in weights]
    with torch.no_grad():
        torch._foreach_add_(weights, [torch.ones(p.shape) for p in weights])
        torch._foreach_mul_(weights[3:], weights[3].detach().abs().max())
    backward(model)
    yield mw.clip_grad_norm_([weights[3]], 0.01)
    yield torch.nn.utils.clip_grad_norm_(model.blocks[3].parameters(), 0.01)
    yield from gradients(model)
    logged: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(
        lambda *_: logged.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001).item())
    )
    optimizer.register_step_post_hook(
        lambda *_: logged.append(sum(p.detach().square().sum() for p in model.parameters()).item())
    )
    optimizer.step()
    yield logged


def optimizers(model: nn.Module) -> Iterator[Any]:
    for kind in (WithGlobalNorm, partial(torch.optim.LBFGS, max_iter=2), torch.optim.Adafactor):
        optimizer: torch.optim.Optimizer = kind(model.parameters())

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            return backward(model)

        for _ in range(2):
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        yield len(optimizer.state), [p in optimizer.state for p in model.parameters()]
        optimizer.state.pop(next(iter(model.parameters())), None)
        yield sum(p.detach().sum() for p in model.parameters()).item()


USES: list[Callable[[nn.Module], Iterator[Any]]] = [
    facts,
    norms,
    penalty,
    initialisation,
    average,
    vectors,
    reading,
    writing,
    frozen,
    repeated,
    optimizers,
]


def plain(value: Any) -> Any:
    """Tensors of any class as numbers of one device."""
    if isinstance(value, Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().clone()
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def differs(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return not isinstance(actual, Tensor) or not torch.allclose(actual, expected, rtol=2e-5, atol=2e-6)
    if isinstance(expected, (list, tuple)):
        return len(actual) != len(expected) or any(map(differs, actual, expected))
    return (
        abs(actual - expected) > 2e-5 * max(1.0, abs(expected))
        if isinstance(expected, float)
        else actual != expected
    )


def planned(pins: dict[str, int]) -> ParallelPlan:
    microbatches = {"microbatches": 2} if "pp" in pins else {}
    return plan_once(Model(), batch(), cluster="laptop-cpu", **microbatches, **pins)


def build(plan: ParallelPlan) -> tuple[nn.Module, nn.Module]:
    reference, parallel = one_and_many(Model, batch(), plan)
    return reference, parallel


def check(rank: int, size: int, pins: dict[str, int]) -> list[str]:
    """The uses whose values, or those of the model afterwards, are not those of one device."""
    wrong, plan = [], planned(pins)
    for use in USES:
        expected: list[Any] = []
        actual: list[Any] = []
        for model, values in zip(build(plan), (expected, actual), strict=True):
            torch.manual_seed(1)
            values += map(plain, use(model))
            values += [plain(value) for value in model.state_dict().values()]
        assert len(actual) == len(expected)
        pairs = enumerate(zip(actual, expected, strict=True))
        wrong += [f"{use.__name__} {i}: {got} for {want}" for i, (got, want) in pairs if differs(got, want)]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(PLANS))
def test_values_are_those_of_one_device(rank_pool: RankPool, plan: str) -> None:
    size, pins = PLANS[plan]
    for wrong in rank_pool.run(size, check, pins, timeout=240):
        assert not wrong, "\n".join(wrong[:5])


def stages(rank: int, size: int, folder: str) -> bool:
    reference, model = build(planned({"pp": 2}))
    mine = [p for p in model.parameters() if not isinstance(p, StageValue) or p.here]
    with own_stages(model):
        # the negative control: a stage alone has other values; a weight that it shares with another may stand elsewhere
        assert {id(p) for p in model.parameters()} == {id(p) for p in mine}
        assert len(mine) < len(list(reference.parameters()))
        assert not any(isinstance(p, StageValue) for p in model.parameters())
        with pytest.raises(UsageError, match="this rank's stages only; call it between steps"):
            mw.full_state_dict(model)
    assert all(value_of(p).is_meta for p in model.parameters() if isinstance(p, StageValue) and not p.here)
    with pytest.raises(UnsupportedError, match=r"mw\.full_state_dict\(model\)"):
        torch.save(model.state_dict(), Path(folder, f"{rank}.pt"))
    optimizer = WithGlobalNorm(model.parameters())
    backward(model)
    optimizer.step()
    mw.save(Path(folder, "step-1"), model=model, optimizer=optimizer).wait()
    before = [plain(optimizer.state[p]["average"]) for p in model.parameters()]
    backward(model)
    optimizer.step()
    mw.load(Path(folder, "step-1"), model=model, optimizer=optimizer)
    after = [plain(optimizer.state[p]["average"]) for p in model.parameters() if p in optimizer.state]
    optimizer.step()
    return all(map(torch.equal, after, before))


@pytest.mark.slow
def test_a_stage_holds_its_own_values_only(rank_pool: RankPool, tmp_path: Path) -> None:
    assert all(rank_pool.run(2, stages, str(tmp_path), timeout=100))


def hooks(rank: int, size: int, folder: str) -> list[bool]:
    """Optimizers that step in hooks of a backward pass, then torch's own distributed checkpoint."""
    plan = planned({"pp": 2})
    models = build(plan)
    for model in models:
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.blocks.parameters()}

        def step(p: Any, steps: Any = steps) -> None:
            steps[p].step()
            steps[p].zero_grad()

        for p in steps:
            p.register_post_accumulate_grad_hook(step)
        backward(model)
        backward(model)
    same = not any(map(differs, *(list(map(plain, model.parameters())) for model in models)))
    reference, fresh = build(plan)
    dcp.save({"model": models[1].state_dict()}, checkpoint_id=Path(folder, "dcp"))
    for model in (reference, fresh):
        dcp.load({"model": model.state_dict()}, checkpoint_id=Path(folder, "dcp"))
        same = same and not any(map(differs, *(list(map(plain, m.parameters())) for m in (model, models[1]))))
    return [same]


@pytest.mark.slow
def test_hooks_and_checkpoints_of_torch_see_a_stage(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(2, hooks, str(tmp_path), timeout=100) == [[True], [True]]


def reset(rank: int, size: int) -> bool:
    """`zero_grad()` exchanges nothing, whether ranks know of the gradients of other stages or not."""
    models = build(planned({"pp": 2}))
    whole, told = whole_model_of(models[1]), list[str]()
    assert whole is not None
    ask = whole.check_same_call

    def check_same_call(call: str) -> None:
        told.append(call)
        ask(call)

    whole.check_same_call = check_same_call  # type: ignore[method-assign]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for resets in (optimizers, models):
        for read_before in (False, True):
            for to_none in (True, False):
                for model in models:
                    backward(model)
                    # the negative control: reading a gradient is a collective call
                    assert not read_before or all(p.grad is not None for p in model.parameters())
                assert bool(told) == read_before
                told.clear()
                for each in resets:
                    each.zero_grad(to_none)  # type: ignore[attr-defined]
                assert not told
                left, same = (list(map(plain, gradients(model))) for model in models)
                assert not any(map(differs, left, same)) and all(x is None for x in left) == to_none
                told.clear()
                for model in models:
                    model.zero_grad()
    return True


@pytest.mark.slow
def test_gradients_are_reset_without_an_exchange(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, reset, timeout=100))


def refused(rank: int, size: int) -> bool:
    """Writes that would not reach a parameter of a stage."""
    _, model = build(planned({"pp": 2}))
    p = model.blocks[3].up.weight

    both = r"stage rank 0 reads values of shapes \[10, 6\].*; stage rank 1 reads values of shapes \[6, 10\]"
    with pytest.raises(UsageError, match=both):
        (model.blocks[0].down if rank else model.blocks[0].up).weight.full_tensor()
    # on the ranks that hold it and on the others
    for weight in (p, model.blocks[0].up.weight):
        with pytest.raises(UnsupportedError, match=r"takes the global value, torch.float32 \[10, 6\]"):
            weight.data = weight.data.double()
        with torch.no_grad(), pytest.raises(UnsupportedError, match="would change the shape"):
            weight.t_()
        weight.retain_grad()
        assert weight.is_signed()
    backward(model)
    with pytest.raises(UnsupportedError, match="only some pipeline stages hold"):
        Swish.apply(p, 1.0)
    with pytest.raises(UnsupportedError, match=r"mw\.GradScaler"):
        infinite, scale = torch.zeros(1), torch.ones(1)
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad], infinite, scale)
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(p.square().sum(), [p], create_graph=True)
    return True


@pytest.mark.slow
def test_writes_that_do_not_reach_a_stage_are_refused(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, refused, timeout=100))
