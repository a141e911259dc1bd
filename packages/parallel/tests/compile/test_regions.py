"""Compiled regions: the numbers of the same calls uncompiled, whatever their Python reads and whatever changes between calls."""

from __future__ import annotations

import copy
import gc
import logging
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.errors import PlanError, UnsupportedError
from meshwright_dtensor.plan import ActivationRule, CompileRule, ParallelPlan, ParameterRule, ZeroRule
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.module_stack import FRAMES
from meshwright_parallel import parallelize
from meshwright_parallel.compile import region
from meshwright_parallel.compile.install import regions_of
from meshwright_parallel.compile.region import MAX_PROGRAMS
from meshwright_parallel.compile.report import regions

pytestmark = pytest.mark.host("regions run as they are under a default device")
LAYOUTS = {"tp2": {"dp": 1, "tp": 2}, "dp2": {"dp": 2, "tp": 1}, "zero3": {"zero": 2}}
WIDTH = 8
FACTOR = 2.0
SEEN: list[torch.Tensor] = []
ACTIVATION: Callable[..., torch.Tensor] = F.gelu


def plan(degrees: dict[str, int], pattern: str = "blocks.*", backend: str = "aot_eager") -> ParallelPlan:
    return ParallelPlan(
        world_size=2,
        degrees=degrees,
        zero=ZeroRule(stage=3) if "zero" in degrees else None,
        parameters=(
            ParameterRule(pattern="*up.weight", placement={"tp": "S(0)"}),
            ParameterRule(pattern="*up.bias", placement={"tp": "S(0)"}),
            ParameterRule(pattern="*down.weight", placement={"tp": "S(1)"}),
        )
        if "tp" in degrees
        else (),
        compile=(CompileRule(pattern=pattern, backend=backend),),
    )


class Block(nn.Module):
    """A residual block; `body` computes what is added."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.act: nn.Module = nn.GELU()
        self.scale = 1.5
        self.scales = [0.5, 0.25]
        self.settings = Settings()
        self.calls = 0
        self.queue: deque[float] = deque()
        self.plain = torch.ones(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


class Settings:
    calls = 0

    def __init__(self) -> None:
        self.alpha = 0.5


class Stack(nn.Module):
    """Three blocks that are alike."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block(body) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            before, h = h, block(h)
        # a block may have written to its argument
        return h.pow(2).mean() + before.mean()


def plain(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = block.dropout(block.act(block.up(block.norm(x))))
    return x + torch.tanh(block.down(h)) * 0.5


def scaled(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.down(block.act(block.up(x))) * block.scale


def listed(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.down(block.act(block.up(x))) * block.scales[0]


def configured(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.down(block.act(block.up(x))) * getattr(block.settings, "alpha", 1.0)


def by_name(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.down(block.act(block.up(x))) * vars(block)["scale"]


def with_global(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.down(ACTIVATION(block.up(x))) * FACTOR


def enclosed(value: list[float]) -> Callable[..., torch.Tensor]:
    factor = value[0]

    def body(block: Any, x: torch.Tensor) -> torch.Tensor:
        return x + block.down(block.act(block.up(x))) * factor

    def change() -> None:
        nonlocal factor
        factor = 0.125

    body.change = change  # type: ignore[attr-defined]
    return body


def counting(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return x + block.down(block.act(block.up(x))) * block.calls


def appending(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.scales.append(0.5)
    return x + block.down(block.act(block.up(x))) * len(block.scales)


def printing(block: Any, x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x + block.down(block.act(block.up(x)))


def gambling(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 0.5 else x + block.down(block.act(block.up(x)))


def timed(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.down(block.act(block.up(x))) * (1.0 if time.time() > 0 else 2.0)


def valued(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = block.down(block.act(block.up(x)))
    return x + h if x.sum().item() > 0 else x - h


def with_tensor(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.down(block.act(block.up(x))) * block.plain


def buffer_of_the_mesh(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean = block.mean + x.detach().abs().amax((0, 1) if x.dim() > 2 else 0)
    return x + block.down(block.act(block.up(x))) * block.mean.clamp(max=0.5)


def writing_buffer(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean.mul_(0.9).add_(0.1)
    return x + block.down(block.act(block.up(x))) - block.mean


def assigning_buffer(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean = block.mean * 0.9 + 0.1
    return x + block.down(block.act(block.up(x))) - block.mean


def writing_argument(block: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    return x + block.down(block.act(block.up(x)))


def viewing(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + block.down(block.act(block.up(x)))
    return h.view(-1, WIDTH)[:, :].view(x.shape)


def kept_result(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = block.down(block.act(block.up(x)))
    block.last = h.detach()
    return x + h


def noting(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = block.down(block.act(block.up(x)))
    block.settings.last = h.detach()
    return x + h


def queueing(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.queue.append(0.5)
    return x + block.down(block.act(block.up(x))) * len(block.queue)


def collecting(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = block.down(block.act(block.up(x)))
    SEEN.append(h.detach())
    return x + h * len(SEEN[:3])


def hooking(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = block.down(block.act(block.up(x)))
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 0.5)
    return x + h


class Reversed(torch.autograd.Function):
    """A gradient that is multiplied by a global."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -FACTOR * gradients[0]


def reversing(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + Reversed.apply(block.down(block.act(block.up(x))))  # type: ignore[no-any-return]


def class_counting(block: Any, x: torch.Tensor) -> torch.Tensor:
    Settings.calls += 1
    return x + block.down(block.act(block.up(x))) * (Settings.calls % 2)


BODIES = {
    name: body
    for name, body in globals().items()
    if callable(body) and getattr(body, "__annotations__", {}).get("block") == "Any"
}
COMPILED = "plain scaled listed configured with_global writing_buffer writing_argument viewing".split()
"""Bodies that are compiled; the others run as they are."""


def run(model: nn.Module, steps: int, change: Callable[[nn.Module, int], None], rows: int = 4) -> list[Any]:
    """Losses and gradients of every step; `change` is called before each."""
    torch.manual_seed(3)
    random.seed(3)
    SEEN.clear()
    Settings.calls = 0
    results = []
    for step in range(steps):
        change(model, step)
        x = torch.randn(rows, 6, generator=seeded(step))
        loss = model(x)
        loss.backward()
        gradients = {}
        for name, p in model.named_parameters():
            g: Any = p.grad
            gradients[name] = (
                None if g is None else (g.full_tensor() if hasattr(g, "full_tensor") else g).clone()
            )
            p.grad = None
        results.append((torch.tensor(loss.item()), gradients))
    return results


def nothing(model: nn.Module, step: int) -> None:
    pass


def same(results: list[Any], others: list[Any]) -> None:
    for (loss, gradients), (expected, wanted) in zip(results, others, strict=True):
        torch.testing.assert_close(loss, expected)
        assert {n for n, g in gradients.items() if g is None} == {n for n, g in wanted.items() if g is None}
        for name, g in gradients.items():
            if g is not None:
                torch.testing.assert_close(g, wanted[name])


def trained(
    body: Callable[..., Any], layout: str, steps: int = 4, change: Any = nothing, backend: str = "aot_eager"
) -> nn.Module:
    """Compare a compiled model with one device; returns it."""
    torch.manual_seed(0)
    model = Stack(body)
    reference = copy.deepcopy(model)
    model = parallelize(model, plan(LAYOUTS[layout], backend=backend))
    same(run(model, steps, change), run(reference, steps, change))
    return model


def _body(rank: int, size: int, name: str, layout: str) -> list[tuple[int, int, Any]]:
    model = trained(BODIES[name], layout)
    return [(row.compiled, row.other, row.reasons) for row in regions(model).rows]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BODIES)
def test_results_are_those_of_one_device(rank_pool: RankPool, name: str, layout: str) -> None:
    for rows in rank_pool.run(2, _body, name, layout):
        compiled, _, reasons = rows[0]
        assert (compiled > 0) == (name in COMPILED), rows
        assert name in COMPILED or reasons


def _inductor(rank: int, size: int, layout: str) -> Any:
    model = trained(plain, layout, backend="inductor")
    return [(row.modules, row.graphs, row.compiled, row.reasons) for row in regions(model).rows]


@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_inductor_runs_blocks_that_are_alike_by_one_graph(rank_pool: RankPool, layout: str) -> None:
    for rows in rank_pool.run(2, _inductor, layout):
        # two of twelve calls show what the code reads
        assert rows == [(3, 1, 10, ())]


def change_scale(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[1].scale = 0.25


def change_item(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[1].scales[0] = 0.75


def change_settings(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[2].settings.alpha = 0.75


def change_global(model: Any, step: int) -> None:
    globals()["FACTOR"] = 0.5 if step >= 3 else 2.0


def change_function(model: Any, step: int) -> None:
    globals()["ACTIVATION"] = F.relu if step >= 3 else F.gelu


def change_mode(model: Any, step: int) -> None:
    model.train(step < 3)


def change_dropout(model: Any, step: int) -> None:
    model.blocks[0].dropout.p = 0.25 if step < 3 else 0.5


def freeze(model: Any, step: int) -> None:
    model.blocks[1].up.weight.requires_grad_(step < 3)


def replace_module(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[1].act = nn.ReLU()


def replace_forward(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[1].act.forward = F.relu


def replace_method(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[1].body = scaled


def add_hook(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[1].up.register_forward_hook(lambda module, args, output: output * 2)


def add_own_hook(model: Any, step: int) -> None:
    if step == 3:
        model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)


CHANGES: dict[str, tuple[Any, Any]] = {
    "attribute": (scaled, change_scale),
    "item of a list": (listed, change_item),
    "attribute of an object": (configured, change_settings),
    "global": (with_global, change_global),
    "global function": (with_global, change_function),
    "mode": (plain, change_mode),
    "dropout": (plain, change_dropout),
    "frozen parameter": (plain, freeze),
    "module": (plain, replace_module),
    "forward of a module inside": (plain, replace_forward),
    "function in an attribute": (plain, replace_method),
    "hook inside": (plain, add_hook),
    "hook": (plain, add_own_hook),
}


def _changed(rank: int, size: int, name: str) -> int:
    body, change = CHANGES[name]
    model = trained(body, "tp2", steps=7, change=change)
    return sum(row.compiled for row in regions(model).rows)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_the_code_reads_is_seen(rank_pool: RankPool, name: str) -> None:
    for compiled in rank_pool.run(2, _changed, name):
        assert compiled >= 7


def _enclosed(rank: int, size: int) -> int:
    body: Any = enclosed([2.0])
    torch.manual_seed(0)
    model = Stack(body)
    reference = copy.deepcopy(model)
    model = parallelize(model, plan(LAYOUTS["tp2"]))
    before = run(model, 3, nothing), run(reference, 3, nothing)
    body.change()
    after = run(model, 3, nothing), run(reference, 3, nothing)
    same(*before)
    same(*after)
    assert after[0][0][0] != before[0][0][0]
    return sum(row.compiled for row in regions(model).rows)


def test_a_variable_of_an_enclosing_function_is_watched(rank_pool: RankPool) -> None:
    assert min(rank_pool.run(2, _enclosed)) >= 7


def _default_device(rank: int, size: int) -> tuple[Any, Any]:
    torch.set_default_device("cpu")
    try:
        model = trained(plain, "tp2")
        (row,) = [row for row in regions(model).rows if row.module == "blocks.0"]
        under = row.compiled, row.reasons
    finally:
        torch.set_default_device(None)
    x = torch.randn(4, 6)
    for _ in range(3):
        model(x)
    (row,) = [row for row in regions(model).rows if row.module == "blocks.0"]
    return under, row.compiled


def test_a_default_device_is_a_reason(rank_pool: RankPool) -> None:
    for (compiled, reasons), after in rank_pool.run(2, _default_device):
        assert compiled == 0 and after > 0
        assert [reason for reason, _ in reasons] == [region.FUNCTION_MODE]


def _lengths(rank: int, size: int) -> tuple[int, int, Any]:
    torch.manual_seed(0)
    model = Stack(plain).eval()
    reference = copy.deepcopy(model)
    model = parallelize(model, plan(LAYOUTS["tp2"]))
    for rows in [*range(2, 52), *range(2, 52)]:
        x = torch.randn(rows, 6)
        torch.testing.assert_close(model(x).item(), reference(x).item())
    (row,) = [row for row in regions(model).rows if row.module == "blocks.0"]
    return row.graphs, row.compiled, row.reasons


def test_many_shapes_make_few_graphs(rank_pool: RankPool) -> None:
    for graphs, compiled, reasons in rank_pool.run(2, _lengths):
        assert 0 < graphs <= MAX_PROGRAMS and compiled > 0
        assert "pad the batches" in reasons[0][0]


def _twice(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = Stack(scaled)
    reference = copy.deepcopy(model)
    model = parallelize(model, plan(LAYOUTS["tp2"], backend="inductor"))
    x = torch.randn(4, 6)
    for each in (model, reference):
        for _ in range(3):
            each(x).backward()
        loss = each(x)
        loss.backward(retain_graph=True)
        loss.backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert regions(model).rows[0].compiled
    model.zero_grad()
    (gradient,) = torch.autograd.grad(model(x), [model.first.weight], create_graph=True)
    (expected,) = torch.autograd.grad(reference(x), [reference.first.weight], create_graph=True)
    torch.testing.assert_close(gradient.full_tensor(), expected)
    with pytest.raises(
        UnsupportedError, match=r"passes through a compiled Block.*leave this module out of compile="
    ):
        gradient.square().sum().backward()
    # no part of it has arrived
    assert all(p.grad is None for p in model.parameters())


def test_a_graph_can_be_kept_for_a_second_backward_pass(rank_pool: RankPool) -> None:
    rank_pool.run(2, _twice)


class TwoResults(nn.Module):
    """Blocks of two results; the second needs parameters of its own."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(shared) for _ in range(3))

    def forward(self, x: torch.Tensor, main: bool = True, side: bool = False) -> torch.Tensor:
        others = []
        for block in self.blocks:
            x, other = block(x)
            others.append(other)
        loss = x.pow(2).mean() if main else 0.0
        return loss + sum(o.mean() for o in others[:1]) if side else loss  # type: ignore[return-value]


class Pair(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        side = torch.sigmoid(F.gelu(self.up(x))).tanh()
        return (x * torch.sigmoid(self.down(side if self.shared else x)), side)


def _results(rank: int, size: int, shared: bool) -> Any:
    torch.manual_seed(0)
    model = TwoResults(shared)
    reference = copy.deepcopy(model)
    model = parallelize(model, plan(LAYOUTS["dp2"]))
    x = torch.randn(4, WIDTH)
    for each in (model, reference):
        for _ in range(4):
            each.zero_grad()
            each(x).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    if shared:
        with pytest.raises(UnsupportedError, match="leave this module out of compile="):
            model(x, main=False, side=True).backward()
    return regions(model).rows[0]


def test_a_parameter_without_a_gradient_gets_none(rank_pool: RankPool) -> None:
    for row in rank_pool.run(2, _results, False):
        assert row.compiled == 0 and "different parameters" in row.reasons[0][0]
    for row in rank_pool.run(2, _results, True):
        assert row.compiled > 0


def _copied(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = parallelize(Stack(scaled), plan(LAYOUTS["tp2"]))
    x = torch.randn(4, 6)
    for _ in range(3):
        model(x).backward()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    expected = model(x).item()
    for _ in range(3):
        assert other(x).item() != expected
    assert model(x).item() == expected
    ours = {id(region) for region in regions_of(model).values()}
    assert not ours & {id(region) for region in regions_of(other).values()}


def test_a_copied_model_has_regions_of_its_own(rank_pool: RankPool) -> None:
    rank_pool.run(2, _copied)


BEGUN: list[Any] = []


class CalledAgain(Stack):
    """Each block runs twice in a forward, and calls one activation twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(block(h))
        BEGUN.append(FRAMES.numbers(("blocks.0.act", "blocks.2.act")))
        return h.pow(2).mean()


def _of_one_call(rank: int, size: int) -> tuple[list[int], int, int]:
    torch.manual_seed(0)
    model = CalledAgain(lambda block, x: x + block.act(block.down(block.act(block.up(x)))))
    reference = copy.deepcopy(model)
    rows = {"function": "gelu", "inputs": [{"tp": "S(0)"}]}
    rules = [{**rows, "module": "blocks.*.act", "forward": n} for n in (1, 2)]
    activations = [ActivationRule(**rule) for rule in (*rules, {**rows, "module": "blocks.0.act"})]
    model = parallelize(model, plan(LAYOUTS["tp2"]).replace(activations=activations))
    BEGUN.clear()
    results = run(model, 4, nothing)
    # in compiled calls too
    assert BEGUN == [(4, 4)] * 4
    same(results, run(reference, 4, nothing))
    kinds = [id(region.kind) for region in regions_of(model).values()]
    (row, *_) = [row for row in regions(model).rows if row.modules == 2]
    return [kinds.index(kind) for kind in kinds], row.graphs, row.compiled


def test_what_a_plan_wants_of_one_call_is_in_the_graph_of_that_call(rank_pool: RankPool) -> None:
    for kinds, graphs, compiled in rank_pool.run(2, _of_one_call):
        # the first block has other rules; both calls of a block have a graph each
        assert kinds == [0, 1, 1] and graphs == 2 and compiled > 0


def _unmatched(rank: int, size: int) -> None:
    with pytest.raises(PlanError, match=r"compile\[0\].pattern"):
        parallelize(Stack(scaled), plan(LAYOUTS["tp2"], pattern="layers.*"))


def test_a_pattern_that_matches_nothing_is_an_error(rank_pool: RankPool) -> None:
    rank_pool.run(2, _unmatched)


class Checkpointed(Stack):
    """The same blocks, each run again in the backward pass."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return h.pow(2).mean()


def _checkpointed(rank: int, size: int, reentrant: bool, layout: str) -> int:
    torch.manual_seed(0)
    model = Checkpointed(plain)
    model.reentrant = reentrant
    reference = copy.deepcopy(model)
    model = parallelize(model, plan(LAYOUTS[layout]))
    same(run(model, 4, nothing), run(reference, 4, nothing))
    return sum(row.compiled for row in regions(model).rows)


@pytest.mark.parametrize("layout", ["tp2", "zero3"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_runs_twice_in_the_same_way(
    rank_pool: RankPool, reentrant: bool, layout: str
) -> None:
    assert min(rank_pool.run(2, _checkpointed, reentrant, layout)) > 0


class Shares(nn.Module):
    """A block that writes to one argument and reads another, which may be a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return torch.tanh(self.up(x)) + y


class Sharing(nn.Module):
    shared = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shares() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            h = h.sin()
            h = block(h, h.view(h.shape) if self.shared else h.clone())
        return h.pow(2).mean()


def _sharing(rank: int, size: int) -> int:
    torch.manual_seed(0)
    model = Sharing()
    reference = copy.deepcopy(model)
    model = parallelize(model, plan({"dp": 2}))
    x = torch.randn(4, WIDTH)
    for step in range(8):
        model.shared = reference.shared = step >= 4
        torch.testing.assert_close(model(x).item(), reference(x).item())
    return sum(row.compiled for row in regions(model).rows)


def test_arguments_that_share_memory_are_another_call(rank_pool: RankPool) -> None:
    assert min(rank_pool.run(2, _sharing)) > 0


class TakesView(nn.Module):
    """A block whose second argument is a view, which it writes to where `writes` says so."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if self.writes:
            part.mul_(0.5)
        h = torch.tanh(self.layer(x))
        # a view of the view
        return h + torch.sigmoid(part[:, :1]) * h


class GivesViews(nn.Module):
    """Columns of a value that tp shards by columns: on one device they share its memory."""

    writes = stale = False

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(TakesView() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        part = wide[:, 1:3]
        assert type(part).__name__ in ("Tensor", "DetachedView")
        if self.stale:
            wide.add_(1.0)
        h = wide.tanh()
        for block in self.blocks:
            block.writes = self.writes  # type: ignore[assignment]
            h = block(h, part)
        return h.pow(2).mean() + wide.mean()


def _views(rank: int, size: int) -> tuple[list[int], list[str]]:
    """Compiled calls after steps that read views, after steps that write to them, and after an error; the reasons."""
    torch.manual_seed(0)
    model: Any = GivesViews()
    reference = copy.deepcopy(model)
    tp2 = plan(LAYOUTS["tp2"])
    model = parallelize(model, tp2.replace(parameters=tp2.parameters[:2]))
    counts = []
    for writes in (False, True):
        model.writes = reference.writes = writes
        same(run(model, 4, nothing), run(reference, 4, nothing))
        counts.append(sum(row.compiled for row in regions(model).rows))
    model.writes, model.stale = False, True
    with pytest.raises(UnsupportedError, match="whose base was modified in place"):
        model(torch.randn(4, 6))
    counts.append(sum(row.compiled for row in regions(model).rows))
    return counts, [reason for row in regions(model).rows for reason, _ in row.reasons]


def test_views_that_had_to_be_gathered_are_arguments_of_a_graph(rank_pool: RankPool) -> None:
    for counts, reasons in rank_pool.run(2, _views):
        # two calls of the first block, which gets another layout, and two of the others show what the code reads; calls that write
        # to the view, or that get a stale one, run as they are
        assert counts == [8, 8, 8]
        assert any("writes to a view" in reason for reason in reasons)
        assert any("modified in place after the view was taken" in reason for reason in reasons)


def _kept_alive(rank: int, size: int) -> int:
    """How many arguments of compiled blocks are alive after their steps."""
    model: Any = parallelize(Stack(plain), plan(LAYOUTS["tp2"]))
    given: list[Any] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: given.append(weakref.ref(args[0]._local)))
    run(model, 4, nothing)
    gc.collect()
    assert sum(row.compiled for row in regions(model).rows) > 0 and len(given) == 12
    return sum(reference() is not None for reference in given)


def test_a_graph_keeps_no_values_of_its_first_call(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, _kept_alive) == [0, 0]


@contextmanager
def warnings_told() -> Iterator[list[str]]:
    """The warnings of the logger "meshwright" inside."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshwright")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def _slow_compiler(rank: int, size: int) -> list[str]:
    """The warnings of a rank whose compiler takes longer than the limit, and of one whose compiler does not."""
    with warnings_told() as told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(region, "SLOW_SECONDS", 0.05 if rank else 60.0)
        before = region.compile_call

        def compile_slowly(*args: Any) -> Any:
            time.sleep(0.5)
            return before(*args)

        patch.setattr(region, "compile_call", compile_slowly)
        trained(plain, "tp2")
    return told


def test_a_compiler_that_does_not_end_is_told(rank_pool: RankPool) -> None:
    quick, slow = rank_pool.run(2, _slow_compiler)
    assert not quick and "leave the module out of compile=" in slow[0]


def _without_a_compiler(rank: int, size: int) -> tuple[list[Any], list[str]]:
    """A rank whose machine has none, next to one that compiles: the results of one device on both."""
    searched = (None, "no-such-compiler") if rank == 0 else config.cpp.cxx
    with warnings_told() as told, config.patch({"cpp.cxx": searched}):
        model = trained(plain, "tp2", backend="inductor")
        # what runs the recorded operations needs no compiler
        recorded = trained(plain, "tp2")
    assert sum(row.compiled for row in regions(recorded).rows) > 0
    return [(row.compiled, row.reasons) for row in regions(model).rows], told


def test_without_a_compiler_calls_run_as_they_are(rank_pool: RankPool) -> None:
    (without, told), (compiled, quiet) = rank_pool.run(2, _without_a_compiler)
    ((count, ((reason, calls),)),) = without
    assert count == 0 and calls == 12 and "finds no C++ compiler" in reason
    assert told == [f"compile= has no effect on this rank: {reason}"] and not quiet
    assert compiled[0][0] > 0


def _gathering_twice(rank: int, size: int) -> list[Any]:
    """Rows that a rank has a part of, gathered for a layer and for a sum: their gradients come back in different ways."""

    def body(block: Any, x: torch.Tensor) -> torch.Tensor:
        rows = torch.tanh(x)
        return rows.add(block.down(block.act(block.up(rows))))

    torch.manual_seed(0)
    model: nn.Module = Stack(body)
    reference = copy.deepcopy(model)
    rules = {
        ("blocks.*", "tanh"): [{"tp": "S(0)"}],
        ("blocks.*.up", "linear"): [{"tp": "X"}, {"tp": "S(0)"}, {"tp": "S(0)"}],
        ("blocks.*", "add"): [{"tp": "I"}, {"tp": "I"}],
    }
    activations = [{"module": m, "function": f, "inputs": inputs} for (m, f), inputs in rules.items()]
    model = parallelize(model, plan(LAYOUTS["tp2"]).replace(activations=activations))
    same(run(model, 4, nothing), run(reference, 4, nothing))
    return [(row.compiled, row.reasons) for row in regions(model).rows]


def test_equal_collectives_stay_several_in_a_graph(rank_pool: RankPool) -> None:
    # a rank that runs uncompiled makes each of them
    assert rank_pool.run(2, _gathering_twice) == [[(10, ())]] * 2


class Experts(nn.Module):
    """Rows go to the expert of their first column's sign: how many each gets is data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(rows) > 0:
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])) * 2.0)
        return out


class Mixing(nn.Module):
    """Stands for the attention of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(F.gelu(self.up(x))))


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.routed = Mixing(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.routed(x)


class RoutedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def _routed(rank: int, size: int, layout: str) -> dict[str, tuple[int, int]]:
    torch.manual_seed(0)
    model: nn.Module = RoutedStack()
    reference = copy.deepcopy(model)
    model = parallelize(model, plan(LAYOUTS[layout]))
    same(run(model, 5, nothing, rows=8), run(reference, 5, nothing, rows=8))
    return {row.module: (row.compiled, row.other) for row in regions(model).rows}


@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_experts_run_as_they_are_inside_of_a_block_whose_attention_is_compiled(
    rank_pool: RankPool, layout: str
) -> None:
    for counts in rank_pool.run(2, _routed, layout):
        assert counts["blocks.0"][0] == 0 and counts["blocks.0.routed"][0] == 0
        compiled, other = counts["blocks.0.attention"]
        # two calls show what the code reads, and the parts begin when the blocks were refused
        assert compiled >= 6 and other <= 3
