"""The gradient reduction engine alone, on real ranks: plain and DTensor parameters whose gradients are partial.

Each rank works on its rows of a batch; the sum over ranks must be the gradient of the whole batch on one device.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel._torch import core
from meshwright_parallel.engine import buckets as bucketing
from meshwright_parallel.engine.buckets import BucketSizes
from meshwright_parallel.engine.grad_reduction import DataReduction

ROWS = 12
SMALL = 300  # bytes: several buckets in a small model
SINGLES = BucketSizes(2**20, single=200)  # every weight is reduced in place


class Net(nn.Module):
    """Odd sizes, a tied weight, an unused layer, a frozen bias, a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.unused = nn.Linear(5, 5)
        self.second = nn.Linear(11, 7)
        self.tied = nn.Linear(7, 11, bias=False)
        self.tied.weight = self.first.weight
        self.columns = nn.Parameter(torch.randn(7, 11).t())
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        h = torch.tanh(self.first(x)) + self.tied(x)
        if use:
            h = h + self.unused(x[:, :5]).sum(1, keepdim=True)
        return self.second(h * (x @ self.columns.t()))


def names_in_buckets(engine: DataReduction) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in engine._buckets]


def build(dtype: torch.dtype = torch.float64) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(3)
    model = Net().to(dtype)
    return model, torch.randn(ROWS, 7, dtype=dtype)


def mesh_of(world_size: int, *names: str) -> DeviceMesh:
    sizes = (world_size,) if len(names) == 1 else (world_size // 2, 2)
    return init_device_mesh(device_type(), sizes, mesh_dim_names=names)


def engine_of(model: nn.Module, mesh: DeviceMesh, **more: Any) -> DataReduction:
    axes = tuple(mesh.mesh_dim_names or ())
    return DataReduction(mesh, [(n, p, axes) for n, p in model.named_parameters()], **more)


def rows(x: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return x.chunk(world_size)[rank]


def loss(model: nn.Module, x: torch.Tensor, **more: Any) -> torch.Tensor:
    return model(x, **more).square().sum() / ROWS


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same(actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert {n for n, g in actual.items() if g is None} == {n for n, g in expected.items() if g is None}
    for name, want in expected.items():
        if want is not None:
            got = actual[name]
            assert got is not None
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
            assert got.stride() == want.stride(), name


def train(
    rank: int, world_size: int, axes: tuple[str, ...], bucket_bytes: int | BucketSizes, engine: bool
) -> list[Any]:
    """Three steps with accumulation, unused and newly used parameters; the gradients after each backward."""
    model, x = build()
    if world_size > 1 and engine:
        attached = engine_of(model, mesh_of(world_size, *axes), bucket_bytes=bucket_bytes)
    seen = []
    for step, use in enumerate((False, True, False)):
        for scale in (1.0, 2.0, -0.5)[: step + 1]:
            loss(model, rows(x * scale, rank, world_size), use=use).backward()
            seen.append(gradients(model))
        if step == 1:
            for p in model.parameters():  # zero_grad(set_to_none=False): the gradients are written in place
                if p.grad is not None:
                    p.grad.zero_()
        else:
            model.zero_grad()
    if world_size > 1 and engine:
        assert len(attached._buckets) == {SMALL: 4, 2**20: 1, SINGLES: 5}[bucket_bytes]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "axes"), [(2, ("dp",)), (4, ("dp",)), (4, ("outer", "inner"))])
@pytest.mark.parametrize("bucket_bytes", [SMALL, 2**20, SINGLES])
def test_sums_equal_one_device(
    rank_pool: RankPool, world_size: int, axes: tuple[str, ...], bucket_bytes: int | BucketSizes
) -> None:
    (expected,) = rank_pool.run(1, train, axes, bucket_bytes, True)
    for actual in rank_pool.run(world_size, train, axes, bucket_bytes, True):
        for got, want in zip(actual, expected, strict=True):
            assert_same(got, want)


@pytest.mark.slow
def test_without_engine_the_difference_shows(rank_pool: RankPool) -> None:
    (expected,) = rank_pool.run(1, train, ("dp",), SMALL, True)
    actual = rank_pool.run(2, train, ("dp",), SMALL, False)
    with pytest.raises(AssertionError):
        assert_same(actual[0][0], expected[0])


def first_gradients(rank: int, world_size: int, dtype: torch.dtype) -> Any:
    model, x = build(dtype)
    mesh = mesh_of(world_size, "dp")
    engine = engine_of(model, mesh)
    loss(model, rows(x, rank, world_size)).backward()
    before = names_in_buckets(engine)
    model.zero_grad()
    with communication() as log:
        out = loss(model, rows(x, rank, world_size))
        out.backward(retain_graph=True)
        once = gradients(model)
        out.backward()
    return once, gradients(model), before, log.events


@pytest.mark.slow
def test_retain_graph_log_and_order(rank_pool: RankPool) -> None:
    ((once, twice, _, events),) = rank_pool.run(1, first_gradients, torch.float32)
    assert not events  # nothing to sum in a world of one
    for actual in rank_pool.run(2, first_gradients, torch.float32):
        assert_same(actual[0], once)
        assert_same(actual[1], twice)
        assert actual[2] == [
            ["columns", "second.weight", "second.bias", "first.weight", "unused.bias", "unused.weight"]
        ] or (
            actual[2][0][-2:]
            == ["unused.bias", "unused.weight"]  # unused last, whatever the order of the others
        )
        assert [(e.kind, e.axis, e.phase) for e in actual[3]] == [("all_reduce", "dp", "backward")] * 2
        numel = 7 * 11 + 25 + 5 + 7 * 11 + 7 + 7 * 11
        assert actual[3][0].nbytes == 4 * (numel + 6)  # one flag per parameter


def mixed_types(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    a = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    c = torch.randn(2, dtype=torch.float32, requires_grad=True)
    x = torch.randint(-4, 5, (4, 5), dtype=torch.float64)
    engine = DataReduction(
        mesh_of(world_size, "dp"), [(n, p, ("dp",)) for n, p in (("a", a), ("b", b), ("c", c))]
    )
    part = rows(x, rank, world_size)
    (
        (part @ a).sum() + (part[:, :3].to(b.dtype) @ b).sum().double() + (part[:, :2].float() * c).sum()
    ).backward()
    return a.grad, b.grad, c.grad, len(engine._buckets)


def test_each_dtype_has_its_own_bucket(rank_pool: RankPool) -> None:
    *expected, _ = rank_pool.run(1, mixed_types)[0]
    for *actual, buckets in rank_pool.run(2, mixed_types):
        assert buckets == 3
        for got, want in zip(actual, expected, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)  # small integers: exact in every dtype


class Broken(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


def broken_pass(rank: int, world_size: int, where: str, filling: int | BucketSizes) -> Any:
    model, x = build()
    x = rows(x, rank, world_size)
    engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=filling)
    if where == "first":
        earlier = gradients(model)
    else:
        loss(model, x).backward()
        earlier = gradients(model)
    if where == "hook":  # after the engine's own hook: the gradient of `first.weight` is between two places
        handle = model.first.weight.register_hook(lambda g: 1 / 0)
        failing, error = loss(model, x), ZeroDivisionError
    else:
        hidden = Broken.apply(torch.tanh(model.first(x)))
        failing, error = model.second(hidden).sum(), ArithmeticError
    with pytest.raises(error):
        failing.backward()
    kept = gradients(model)
    if where == "hook":
        handle.remove()
    loss(model, x).backward()
    return earlier, kept, gradients(model)


@pytest.mark.parametrize("filling", [SMALL, SINGLES])
@pytest.mark.parametrize("where", ["first", "later", "hook"])
def test_backward_that_raises_keeps_gradients(
    rank_pool: RankPool, where: str, filling: int | BucketSizes
) -> None:
    model, x = build()
    for _ in range(1 if where == "first" else 2):
        loss(model, x).backward()
    for earlier, kept, after in rank_pool.run(2, broken_pass, where, filling):
        assert_same(kept, earlier)
        assert_same(after, gradients(model))


def test_the_error_of_a_pass_waits_until_its_thread_has_freed_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on accelerators: the thread of a device tells of the error first."""
    held: list[Any] = []

    def failing() -> None:
        held.append(lambda: None)
        core.release_failed_passes().add(held[0])
        threading.Timer(0.05, held.clear).start()
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", failing)

    # a pass around this one is not waited for
    def outer() -> None: ...

    core.release_failed_passes().add(outer)
    with pytest.raises(ArithmeticError):
        torch.autograd._engine_run_backward()  # type: ignore[attr-defined]
    assert not held


def captured(rank: int, world_size: int) -> Any:
    model, x = build()
    x = rows(x, rank, world_size)
    engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=SMALL)
    loss(model, x).backward()
    kept = gradients(model)
    pair = [model.first.weight, model.second.bias]
    direct = torch.autograd.grad(loss(model, x), pair)
    assert_same(gradients(model), kept)  # grad() touches no .grad
    model.zero_grad()
    torch.autograd.backward(loss(model, x), inputs=pair)
    if world_size > 1:
        with pytest.raises(UnsupportedError, match="create_graph"):
            loss(model, x).backward(create_graph=True)
    return direct, gradients(model)


def test_autograd_grad_and_inputs(rank_pool: RankPool) -> None:
    ((direct, chosen),) = rank_pool.run(1, captured)
    for actual, found_chosen in rank_pool.run(2, captured):
        torch.testing.assert_close(actual, direct)
        assert_same(found_chosen, chosen)


def reentrant(rank: int, world_size: int) -> Any:
    model, x = build()
    x = rows(x, rank, world_size).requires_grad_()
    engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=SMALL)
    for _ in range(2):
        h = checkpoint(model, x, use_reentrant=True)
        h = checkpoint(model, h, use_reentrant=True) + model(x)
        (h.square().sum() / ROWS).backward()
    return gradients(model)


@pytest.mark.slow
def test_reentrant_checkpoints(rank_pool: RankPool) -> None:
    (expected,) = rank_pool.run(1, reentrant)
    for actual in rank_pool.run(2, reentrant):
        assert_same(actual, expected)


def thawed(rank: int, world_size: int) -> Any:
    model, x = build()
    x = rows(x, rank, world_size)
    engine = engine_of(model, mesh_of(world_size, "dp"))
    loss(model, x).backward()
    model.first.bias.requires_grad_(True)
    model.second.bias.requires_grad_(False)
    engine.refresh()
    loss(model, x).backward()
    return gradients(model)


@pytest.mark.slow
def test_freezing_and_thawing(rank_pool: RankPool) -> None:
    (expected,) = rank_pool.run(1, thawed)
    for actual in rank_pool.run(2, thawed):
        assert_same(actual, expected)


def used_on_one_rank(rank: int, world_size: int, filling: int | BucketSizes) -> Any:
    model, x = build()
    engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=filling)
    loss(model, rows(x, rank, world_size), use=rank == 1).backward()
    return gradients(model)["unused.weight"]


@pytest.mark.parametrize("filling", [SMALL, SINGLES])
def test_ranks_agree_on_which_gradients_exist(rank_pool: RankPool, filling: int | BucketSizes) -> None:
    a, b = rank_pool.run(2, used_on_one_rank, filling)
    assert a is not None
    assert torch.equal(a, b)


def shared_memory(rank: int, world_size: int, trusting: bool) -> list[Any]:
    """Gradients that autograd returns as views of shared memory: of each other, and of a tensor that it still needs."""
    torch.manual_seed(5)
    a, b, c = (nn.Parameter(torch.randn(6, 5, dtype=torch.float64)) for _ in range(3))
    x = torch.randn(ROWS, 30, dtype=torch.float64)
    DataReduction(
        mesh_of(world_size, "dp"), [(n, p, ("dp",)) for n, p in (("a", a), ("b", b), ("c", c))], SINGLES
    )
    original = bucketing.is_only_user_after_accumulation
    if trusting:
        bucketing.is_only_user_after_accumulation = lambda gradient: True
    try:
        factor = rows(x, rank, world_size).sum(0)
        hidden = torch.tanh(c.view(-1)) ** 2 * a.detach().view(-1)
        ((a.view(-1) + hidden + b.view(-1)) * factor).sum().backward()
    finally:
        bucketing.is_only_user_after_accumulation = original
    return [p.grad for p in (a, b, c)]


def test_gradients_in_shared_memory(rank_pool: RankPool) -> None:
    (expected,) = rank_pool.run(1, shared_memory, False)
    for actual in rank_pool.run(2, shared_memory, False):
        torch.testing.assert_close(actual, expected)
    with pytest.raises(AssertionError):  # without the check
        torch.testing.assert_close(rank_pool.run(2, shared_memory, True)[0], expected)


def answers(rank: int, world_size: int) -> list[bool]:
    """The answers of the check for other users, for the large gradients of an ordinary model in two passes."""
    model, x = build()
    engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=SINGLES)
    original, actual = bucketing.is_only_user_after_accumulation, []
    try:
        bucketing.is_only_user_after_accumulation = lambda gradient: (
            actual.append(original(gradient)) or actual[-1]
        )
        for _ in range(2):
            loss(model, rows(x, rank, world_size)).backward()
    finally:
        bucketing.is_only_user_after_accumulation = original
    return actual


def test_ordinary_gradients_are_not_copied(rank_pool: RankPool) -> None:
    for actual in rank_pool.run(2, answers):
        assert actual == [True] * 6


def dtensors(rank: int, world_size: int) -> Any:
    """Parameters over (dp, tp): the gradient arrives as a DTensor whose local data is partial on dp."""
    mesh = init_device_mesh(device_type(), (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    full = torch.randn(6, 4, dtype=torch.float64)
    weight = nn.Parameter(distribute_tensor(full, mesh, [Replicate(), Shard(0)], src_data_rank=None))
    DataReduction(mesh, [("weight", weight, ("dp",))])
    factor = 1.0 + mesh.get_local_rank("dp")
    for _ in range(2):
        weight.backward(DTensor.from_local(weight.to_local().detach() * factor, mesh, weight.placements))
    assert isinstance(weight.grad, DTensor)
    return weight.grad.full_tensor(), full * 6


def test_dtensor_parameters(rank_pool: RankPool) -> None:
    for got, want in rank_pool.run(4, dtensors):
        torch.testing.assert_close(got, want)


def overlapped(rank: int, world_size: int) -> tuple[int, int]:
    """Collectives that had started when the backward pass reached the input, and in the end."""
    model, x = build()
    engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=SMALL)
    x = rows(x, rank, world_size).requires_grad_()
    under_way: list[int] = []
    with communication() as log:
        x.register_hook(lambda g: under_way.append(len(log.events)))
        loss(model, x).backward()
    return under_way[0], len(log.events)


@pytest.mark.slow
def test_sums_start_while_backward_goes_on(rank_pool: RankPool) -> None:
    for under_way, total in rank_pool.run(2, overlapped):
        assert 0 < under_way < total


def dropped(rank: int, world_size: int, steps: int) -> list[bool]:
    """Whether the engine and the parameters outlive a model that is dropped."""
    model, x = build()
    engine = engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=SMALL)
    for _ in range(steps):
        loss(model, rows(x, rank, world_size)).backward()
    left = [weakref.ref(engine), *(weakref.ref(p) for p in model.parameters())]
    del model, engine
    gc.collect()
    return [reference() is not None for reference in left]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
def test_dropped_model_is_freed(rank_pool: RankPool, steps: int) -> None:
    for actual in rank_pool.run(2, dropped, steps):
        assert not any(actual)


def dropped_before_backward(rank: int, world_size: int) -> dict[str, torch.Tensor | None]:
    model, x = build()
    if world_size > 1:
        engine_of(model, mesh_of(world_size, "dp"), bucket_bytes=SMALL)
    parameters = {n: p for n, p in model.named_parameters() if n != "second.weight"}
    value = loss(model, rows(x, rank, world_size))
    del model
    gc.collect()
    value.backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}


@pytest.mark.slow
def test_the_engine_lives_as_long_as_a_parameter(rank_pool: RankPool) -> None:
    (expected,) = rank_pool.run(1, dropped_before_backward)
    for actual in rank_pool.run(2, dropped_before_backward):
        assert_same(actual, expected)


def one_sum_over_two_axes(rank: int, world_size: int) -> Any:
    model, x = build(torch.float32)
    engine_of(model, mesh_of(world_size, "outer", "inner"))
    with communication() as log:
        loss(model, rows(x, rank, world_size)).backward()
    return [(e.kind, e.axis) for e in log.events]


@pytest.mark.slow
def test_two_axes_are_one_collective(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, one_sum_over_two_axes)[0] == [("all_reduce", "outer+inner")]
