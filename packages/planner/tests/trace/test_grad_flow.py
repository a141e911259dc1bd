"""Where gradients flow: operations of the backward pass, and what is kept for it, against torch in real runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operations import BOOK, Net, Residual, counted, kept, planned, profiled, through
from planner_models import DGX_H100, host_of
from torch import nn

from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner import EagerPlanner
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import record


def without_gradients(first: int) -> Net:
    """So many blocks extract features."""

    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = through(blocks[:first], x)
        return through(blocks[first:], x)

    return Net(run)


def frozen(names: Callable[[str], bool]) -> Net:
    """Parameters of these names are not trained."""
    model = Net(through)
    for name, p in model.named_parameters():
        p.requires_grad_(not names(name))
    return model


def _used_twice(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = through(blocks[:3], x)
    return y + blocks[3](y.detach())


def _straight_through(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = through(blocks[:3], x)
    return y + (blocks[3](y) - y).detach()


def _cut(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = through(blocks[:3], x).detach().requires_grad_()
    return through(blocks[3:], y)


def _cut_alike(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x.detach().requires_grad_())
    return x


class Again(nn.Module):
    """Features that nothing is trained by, of which a gradient is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(), Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x.requires_grad_()).square().mean()


class Hidden(torch.autograd.Function):
    """Two products with an operation between them, and a custom backward pass."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        inner = (x @ up).relu()
        ctx.save_for_backward(x, up, down, inner)
        return inner @ down

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, up, down, inner = ctx.saved_tensors
        back = (grad @ down.t()) * (inner > 0)
        required = ctx.needs_input_grad[0]
        flat, rows = x.flatten(0, 1), back.flatten(0, 1)
        return (
            back @ up.t() if required else None,
            flat.t() @ rows,
            inner.flatten(0, 1).t() @ grad.flatten(0, 1),
        )


class Called(nn.Module):
    """A Function after a block that is trained, or runs without gradients."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.trained, self.block = trained, Residual()
        self.up, self.down = nn.Parameter(torch.randn(32, 24)), nn.Parameter(torch.randn(24, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.trained):
            x = self.block(x)
        return Hidden.apply(x, self.up, self.down).square().mean()  # type: ignore[no-untyped-call]


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{f"no_grad {n}": (lambda n=n: without_gradients(n), 16) for n in (1, 3, 5)},  # type: ignore[misc]
    "all but the head frozen": (lambda: frozen(lambda name: not name.startswith("last")), 16),
    "first half frozen": (lambda: frozen(lambda n: n.startswith(("first", "blocks.0", "blocks.1"))), 16),
    "last half frozen": (lambda: frozen(lambda n: n.startswith(("last", "blocks.4", "blocks.5"))), 16),
    "weights frozen": (lambda: frozen(lambda name: name.endswith("weight")), 16),
    "only one projection trained": (lambda: frozen(lambda name: "qkv" not in name), 16),
    "every other block frozen": (lambda: frozen(lambda name: name[7:8] in ("1", "3", "5")), 16),
    "detached for one of two": (lambda: Net(_used_twice), 16),
    "straight through": (lambda: Net(_straight_through), 16),
    "cut": (lambda: Net(_cut), 16),
    "each block by itself": (lambda: Net(_cut_alike), 16),
    "asked of features": (Again, 32),
    "function": (lambda: Called(True), 32),
    "function of features": (lambda: Called(False), 32),
}


@pytest.mark.parametrize("name", CASES)
def test_backward_flops_follow_gradients(name: str) -> None:
    make, width = CASES[name]
    model, batch = make(), Batch.of(torch.randn(2, 10, width))
    assert planned(model, batch) == profiled(model, batch) == counted(model, batch)


@pytest.mark.parametrize("name", [name for name in CASES if "function" not in name])
def test_saved_tensors_follow_gradients(name: str) -> None:
    make, width = CASES[name]
    model, batch = make(), Batch.of(torch.randn(2, 10, width))
    assert record(model, batch, BOOK.composites).activation_bytes == kept(model, batch)


def test_parameters_without_gradient_are_found() -> None:
    """A parameter may require a gradient and get none: where its block runs without."""
    model, batch = without_gradients(3), Batch.of(torch.randn(2, 10, 16))
    tape = record(model, batch, BOOK.composites)
    model(*batch.args).backward()
    for name, p in model.named_parameters():
        assert tape.grad[tape.parameters[name]] == (p.grad is not None), name


def test_batch_with_gradient_in_a_real_run() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y.sum() if y.sum().item() > 1e9 else y.square().mean()

    for required in (False, True):
        model, batch = Looks(), Batch.of(torch.randn(4, 8, requires_grad=required))
        assert record(model, batch, BOOK.composites).real
        assert planned(model, batch) == counted(model, batch)


def test_plan_has_no_time_for_missing_gradients() -> None:
    def parts(model: nn.Module) -> tuple[float, float]:
        batch = (torch.empty(64, 512, 16, device="meta"),)
        plan = EagerPlanner(host_of()).plan(
            model.to("meta"), batch, PlanRequest(cluster=DGX_H100, world_size=1)
        )[0]
        assert plan.predicted is not None and plan.predicted.split is not None
        (stage,) = plan.predicted.split.stages
        return stage.forward_seconds, stage.backward_seconds

    first = ("first", *(f"blocks.{n}" for n in range(3)))
    assert parts(without_gradients(3)) == parts(frozen(lambda name: name.startswith(first)))
    assert parts(without_gradients(3))[1] < 0.6 * parts(without_gradients(0))[1]
