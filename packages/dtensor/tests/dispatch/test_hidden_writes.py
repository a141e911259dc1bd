"""Writes that reach their tensor although the call runs on gathered values: custom operators, views, ordinary indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.testing import assert_close

from meshwright_dtensor.api import as_mesh_parameter, distribute
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


@torch.library.custom_op("meshwright_tests::step", mutates_args={"p", "state"})
def step(p: torch.Tensor, g: torch.Tensor, state: torch.Tensor) -> None:
    """Writes to two arguments, one of them by a sum over all elements; returns nothing."""
    p.sub_(g * 0.5)
    state.add_(p.sum())


torch.library.define("meshwright_tests::uncounted", "(Tensor g, Tensor(a!) p, *, Tensor(b!) state) -> ()")


@torch.library.impl("meshwright_tests::uncounted", "default")
def uncounted(g: torch.Tensor, p: torch.Tensor, *, state: torch.Tensor) -> None:
    """Writes as kernels in C++ do, which count no version."""
    p.data.sub_(g * 0.5)
    state.data.add_(p.sum())


def _set(index: Any, value: float) -> Callable[[Any], None]:
    def write(y: Any) -> None:
        y[index] = value

    return write


def _masked(y: Any) -> None:
    y[y > 0.1] *= 2


def _column(y: Any) -> None:
    y[:, 0] += 1


def _last(y: Any) -> None:
    y[..., 1:3] *= 3


def _row(y: Any) -> None:
    y[1] -= 1


def _view_of_view(y: Any) -> None:
    y.transpose(0, 1)[0][1:3].add_(5)


def _read_after_write(y: Any) -> None:
    column = y[:, 1]
    column.mul_(2)
    column += 1
    y.add_(column.sum())


def _relu(y: Any) -> None:
    F.relu(y[:, 0], inplace=True)


WRITES: dict[str, Callable[[Any], None]] = {
    "masked": _masked,
    "column": _column,
    "last": _last,
    "row": _row,
    "view of view": _view_of_view,
    "read after write": _read_after_write,
    "relu": _relu,
    "hsplit": lambda y: y.hsplit(3)[0].zero_(),
    "moveaxis": lambda y: y.moveaxis(0, 1)[0].zero_(),
    "list mask": _set([True, False, True, False], 7.0),
}


def writes(rank: int, world: int, state: Any, recorded: bool) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    for name, write in WRITES.items():
        torch.manual_seed(0)
        value = torch.randn(4, 6)
        outcomes = []
        for start in (value.clone(), distribute(value, mesh, [state])):
            leaf = start.requires_grad_(recorded)
            y = leaf * 1.5
            write(y)
            if recorded:
                (y * y).sum().backward()
            outcomes.append((y, leaf.grad))
        for expected, actual in zip(*outcomes, strict=True):
            if expected is not None:
                try:
                    assert_close(actual.full_tensor(), expected)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("state", ["I", 0, 1])
def test_writes_through_views_reach_the_base(rank_pool: RankPool, state: Any, recorded: bool) -> None:
    rank_pool.run(2, writes, state, recorded)


def custom(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value, gradient = torch.arange(12.0).view(4, 3), torch.ones(4, 3)
    expected, expected_state = value.clone(), torch.zeros(4, 3)
    torch.ops.meshwright_tests.step(expected, gradient, expected_state)
    made = {
        "parameter": lambda v: as_mesh_parameter(mesh_value(distribute_tensor(v, mesh, [Shard(0)])), (0,)),
        "stored": lambda v: mesh_value(distribute_tensor(v, mesh, [Shard(0)])),
        "activation": lambda v: distribute(v, mesh, [1]),
        "whole": lambda v: distribute(v, mesh, ["I"]),
    }
    for name, make in made.items():
        for counted in (True, False):
            p, g, state = make(value.clone()), make(gradient), make(torch.zeros(4, 3))
            with torch.no_grad():
                if counted:
                    torch.ops.meshwright_tests.step(p, g, state)
                else:
                    torch.ops.meshwright_tests.uncounted(g, p, state=state)
                assert torch.equal(p.full_tensor(), expected), (name, counted)
                assert torch.equal(state.full_tensor(), expected_state), (name, counted)


def test_custom_operators_write_to_their_arguments(rank_pool: RankPool) -> None:
    """As an 8-bit optimizer does; the operator has no sharding rule and returns nothing."""
    rank_pool.run(2, custom)


def renormed(rank: int, world: int, state: int) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    table, ids = torch.randn(8, 6) * 2, torch.tensor([[1, 3, 3], [7, 0, 1]])
    leaf = table.clone().requires_grad_()
    F.embedding(ids, leaf, max_norm=1.0).square().sum().backward()
    weight = as_mesh_parameter(mesh_value(distribute_tensor(table, mesh, [Shard(state)])), (state,))
    F.embedding(distribute(ids, mesh, ["I"]), weight, max_norm=1.0).square().sum().backward()
    assert_close(weight.full_tensor(), leaf)
    assert_close(weight.grad.full_tensor(), leaf.grad)


@pytest.mark.parametrize("state", [0, 1])
def test_embedding_renormalises_its_weight(rank_pool: RankPool, state: int) -> None:
    rank_pool.run(2, renormed, state)


def collectives(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    x = distribute(torch.arange(4.0), mesh, [0])
    # a sum that is not complete yet
    loss = x.sum()
    dist.all_reduce(loss)
    assert loss.item() == 6.0 * world
    gathered = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(gathered, x.sum().detach())
    assert [value.item() for value in gathered] == [6.0] * world
    for call in (lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)):
        with pytest.raises(UnsupportedError, match=r"of which this rank has a part.*full_tensor"):
            call()
    assert x.is_same_size(torch.zeros(4)) and not x.is_same_size(torch.zeros(2))


def test_collectives_of_torch_take_whole_values(rank_pool: RankPool) -> None:
    rank_pool.run(2, collectives)


def statistics(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x, mean, variance = torch.randn(4, 6, 5, 5), torch.zeros(6), torch.ones(6)
    for function in (F.batch_norm, F.instance_norm):
        for state in (0, "P"):
            moved = distribute(mean, mesh, [state])
            options = {"training": True} if function is F.batch_norm else {}
            with pytest.raises(UnsupportedError, match="running statistics must be replicated"):
                function(distribute(x, mesh, [0]), moved, distribute(variance, mesh, ["I"]), **options)
    # nothing is updated in evaluation
    expected = F.batch_norm(x, mean, variance)
    actual = F.batch_norm(
        distribute(x, mesh, [0]), distribute(mean, mesh, [0]), distribute(variance, mesh, [0])
    )
    assert_close(actual.full_tensor(), expected)


def test_running_statistics_are_not_updated_in_a_copy(rank_pool: RankPool) -> None:
    rank_pool.run(2, statistics)


def odd_dtypes(rank: int, world: int) -> None:
    """Dtypes that the backend does not know, lazy conjugates, and samples that are drawn inside of a function."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    for dtype in (
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.complex64,
    ):
        value = torch.arange(35).view(5, 7).to(dtype)
        for state in ("I", 0, 1):
            x = distribute(value, mesh, [state])
            for other in ("I", 0, 1):
                moved = x.redistribute([other]).full_tensor()
                assert torch.equal(moved.contiguous().view(torch.uint8), value.view(torch.uint8)), (
                    dtype,
                    state,
                )
    partial = distribute(torch.arange(6).to(torch.int16), mesh, ["P"])
    assert torch.equal(partial.full_tensor(), torch.arange(6).to(torch.int16))
    value = torch.randn(5, 7)
    uneven = torch.conj(torch.fft.fft(distribute(value, mesh, [0])))
    assert_close(uneven.full_tensor(), torch.conj(torch.fft.fft(value)).resolve_conj())
    image = torch.randn(4, 6, 5, 5)
    for state in (0, 1):
        pooled = []
        for x in (image, distribute(image, mesh, [state])):
            torch.manual_seed(1)
            pooled.append(F.fractional_max_pool2d(x, 2, output_size=(3, 3)))
        assert torch.equal(pooled[1].full_tensor(), pooled[0])


def test_odd_dtypes_are_gathered(rank_pool: RankPool) -> None:
    rank_pool.run(2, odd_dtypes)


def fills(rank: int, world: int) -> None:
    """Torch fills a view of a larger tensor with other numbers than a contiguous one."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    value = torch.zeros(4, 5, 12)
    views = (
        lambda y: y[:, 1],
        lambda y: y[1:3],
        lambda y: y[..., ::2],
        lambda y: y.transpose(1, 2),
        lambda y: y,
    )
    for state in ("I", 0):
        for number, view in enumerate(views):
            ends, filled = [], []
            for y in (value.clone(), distribute(value, mesh, [state])):
                torch.manual_seed(3)
                view(y).normal_()
                ends.append(torch.rand(1))
                filled.append(y)
            assert torch.equal(filled[1].full_tensor(), filled[0]), (state, number)
            assert torch.equal(*ends)


def test_views_are_filled_as_on_one_device(rank_pool: RankPool) -> None:
    rank_pool.run(2, fills)


def inferred(rank: int, world: int) -> None:
    """Torch counts no writes to tensors of inference mode."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value = torch.tensor([3.0, 1.0, 2.0, 1.0])
    with torch.inference_mode():
        for state in ("I", 0):
            x = distribute(value, mesh, [state]) * 1
            assert torch.equal(torch.unique(x).full_tensor(), torch.unique(value))
            assert_close(torch.linalg.pinv(x.view(2, 2)).full_tensor(), torch.linalg.pinv(value.view(2, 2)))


def test_gathered_calls_run_in_inference_mode(rank_pool: RankPool) -> None:
    rank_pool.run(2, inferred)
