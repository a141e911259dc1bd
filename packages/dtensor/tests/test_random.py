"""Numbers drawn on a layout are those of one device, bit for bit, and leave the generator where one device
leaves it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.random import (
    PIECE_NUMEL,
    Part,
    draw_part,
    draws_by_element,
    run_random,
)
from meshwright_dtensor.sharding.boxes import (
    Box,
    box_shape,
    chunk_box,
    dense_strides,
    dim_order_of,
    slice_of,
)
from meshwright_dtensor.testing.on_device import device_type, random_state, seeded, set_random_state
from meshwright_dtensor.testing.rank_pool import RankPool

aten = torch.ops.aten

# mesh sizes, states per mesh axis
LAYOUTS: list[tuple[tuple[int, ...], tuple[str | int, ...]]] = [
    ((4,), (0,)),
    ((3,), (1,)),
    ((2, 2), (0, 1)),
    ((2, 2), (1, 1)),
    ((2, 3), ("I", 0)),
    ((2,), ("X",)),
]
SHAPES = [(10, 7, 6), (16, 16), (17, 5), (5, 33)]
FILLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bernoulli_": (aten.bernoulli_.float, (0.3,)),
    "normal_": (aten.normal_.default, (1.0, 2.0)),
    "uniform_": (aten.uniform_.default, (-1.0, 3.0)),
    "exponential_": (aten.exponential_.default, (0.7,)),
    "random_": (aten.random_.default, ()),
    "random_to": (aten.random_.to, (100,)),
    "random_from": (getattr(aten.random_, "from"), (-5, 100)),
    "log_normal_": (aten.log_normal_.default, (0.1, 0.3)),
    "cauchy_": (aten.cauchy_.default, ()),
    "geometric_": (aten.geometric_.default, (0.4,)),
}


def boxes_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], states: tuple[str | int, ...]
) -> list[tuple[tuple[int, ...], Box]]:
    ranks = itertools.product(*(range(size) for size in mesh))
    return [(coords, chunk_box(shape, mesh, coords, states)) for coords in ranks]


def one_device(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    full = torch.empty_strided(shape, dense_strides(shape, order), dtype=dtype)
    return full.copy_(torch.arange(math.prod(shape)).reshape(shape) / math.prod(shape))


def orders(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    dims = tuple(range(len(shape)))
    return [dims, tuple(reversed(dims)), (*dims[1:], dims[0])]


def same_on_every_rank(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    dtype: torch.dtype,
    full_op: Callable[[torch.Tensor], Any],
    local_op: Callable[[torch.Tensor, Part], Any],
) -> None:
    """Run `full_op` on one device and `local_op` on each rank of each layout; all outputs and generator
    states agree.
    """
    torch.manual_seed(11)
    torch.rand(3)
    start = random_state()
    wanted = full_op(one_device(shape, order, dtype))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    end = random_state()
    assert not torch.equal(start, end)
    for mesh, states in LAYOUTS:
        for coords, box in boxes_of(shape, mesh, states):
            set_random_state(start)
            value = slice_of(one_device(shape, order, dtype), box)
            local = torch.empty_strided(value.shape, dense_strides(value.shape, order), dtype=dtype).copy_(
                value
            )
            got = local_op(local, Part(shape, order, box))
            got = got if isinstance(got, tuple) else (got,)
            for a, b in zip(got, wanted, strict=True):
                assert torch.equal(a, slice_of(b, box)), (mesh, states, coords)
                assert a.stride() == dense_strides(a.shape, dim_order_of(b))
            assert torch.equal(random_state(), end)


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_in_place_ops_equal_one_device(name: str, shape: tuple[int, ...]) -> None:
    op, rest = FILLS[name]
    for order in orders(shape):

        def run(local: torch.Tensor, part: Part) -> torch.Tensor:
            result = run_random(op, (local, *rest), {}, [part])
            assert result is local
            return result

        same_on_every_rank(shape, order, torch.float32, lambda full: op(full, *rest), run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_dtypes_equal_one_device(dtype: torch.dtype) -> None:
    names = (
        ["bernoulli_", "random_to"]
        if dtype == torch.int64
        else ["bernoulli_", "normal_", "uniform_", "exponential_"]
    )
    for name in names:
        op, rest = FILLS[name]
        same_on_every_rank(
            (9, 20),
            (0, 1),
            dtype,
            lambda full, op=op, rest=rest: op(full, *rest),
            lambda local, part, op=op, rest=rest: run_random(op, (local, *rest), {}, [part]),
        )


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "rand_like": (aten.rand_like.default, (), {}),
    "randn_like": (aten.randn_like.default, (), {"memory_format": torch.preserve_format}),
    "randn_like_double": (aten.randn_like.default, (), {"dtype": torch.float64}),
    "randn_like_contiguous": (aten.randn_like.default, (), {"memory_format": torch.contiguous_format}),
    "randint_like": (aten.randint_like.low_dtype, (-3, 40), {}),
    "bernoulli": (aten.bernoulli.default, (), {}),
    "bernoulli_p": (aten.bernoulli.p, (0.2,), {}),
    "dropout": (aten.native_dropout.default, (0.4, True), {}),
    "normal": (aten.normal.Tensor_float, (0.5,), {}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_of_place_ops_equal_one_device(name: str) -> None:
    op, rest, kwargs = FUNCTIONS[name]
    for shape, index in itertools.product(SHAPES, range(3)):
        order = orders(shape)[index]
        same_on_every_rank(
            shape,
            order,
            torch.float32,
            lambda full: op(full, *rest, **kwargs),
            lambda local, part: run_random(op, (local, *rest), kwargs, [part]),
        )


def test_op_with_two_tensor_parts() -> None:
    shape, small = (10, 7), (7,)
    probability = torch.linspace(0, 1, 7)
    torch.manual_seed(3)
    want = torch.empty(shape).bernoulli_(probability)
    end = random_state()
    for mesh, states in LAYOUTS:
        for _, box in boxes_of(shape, mesh, states):
            torch.manual_seed(3)
            parts = [Part(shape, (0, 1), box), Part(small, (0,), box[1:])]
            local = torch.full(box_shape(box), -1.0)
            got = run_random(aten.bernoulli_.Tensor, (local, slice_of(probability, box[1:])), {}, parts)
            assert got is local
            assert torch.equal(got, slice_of(want, box))
            assert torch.equal(random_state(), end)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.rand.default, ([6, 8],)),
        (aten.randn.default, ([6, 8],)),
        (aten.randint.low, (2, 9, [6, 8])),
        (aten.normal.float_float, (0.0, 2.0, [6, 8])),
        (aten.randperm.default, (11,)),
    ],
)
def test_factories_take_the_global_size(op: Any, args: tuple[Any, ...]) -> None:
    torch.manual_seed(5)
    want = op(*args)
    end = random_state()
    shape = tuple(want.shape)
    for _, box in boxes_of(shape, (3,), (0,)):
        torch.manual_seed(5)
        got = run_random(op, args, {}, [], Part(shape, tuple(range(len(shape))), box))
        assert torch.equal(got, slice_of(want, box))
        assert torch.equal(random_state(), end)


def test_gradients_pass_through_dropout() -> None:
    torch.manual_seed(7)
    full = torch.randn(8, 6, requires_grad=True)
    torch.manual_seed(8)
    aten.native_dropout.default(full, 0.5, True)[0].square().sum().backward()
    assert full.grad is not None
    box = chunk_box((8, 6), (2,), (1,), (0,))
    local = slice_of(full.detach(), box).clone().requires_grad_()
    torch.manual_seed(8)
    output, _ = run_random(aten.native_dropout.default, (local, 0.5, True), {}, [Part((8, 6), (0, 1), box)])
    output.square().sum().backward()
    assert local.grad is not None
    assert torch.equal(local.grad, slice_of(full.grad, box))


def test_generator_argument_is_used_instead_of_default() -> None:
    shape = (12, 5)
    generator = seeded(2)
    want = torch.empty(shape).normal_(generator=generator)
    box = chunk_box(shape, (2,), (1,), (0,))
    default = random_state()
    again = seeded(2)
    local = torch.empty(box_shape(box))
    run_random(aten.normal_.default, (local,), {"generator": again}, [Part(shape, (0, 1), box)])
    assert torch.equal(local, slice_of(want, box))
    assert torch.equal(again.get_state(), generator.get_state())
    assert torch.equal(random_state(), default)


PIECED: dict[str, Callable[[torch.Tensor], Any]] = {
    "bernoulli_": lambda tensor: tensor.bernoulli_(0.1),
    "uniform_": lambda tensor: tensor.uniform_(-2, 5),
    "normal_": lambda tensor: tensor.normal_(),
    "exponential_": lambda tensor: tensor.exponential_(),
    "geometric_": lambda tensor: tensor.geometric_(0.2),
}


@pytest.mark.host("draws in pieces")
@pytest.mark.slow
@pytest.mark.parametrize("name", PIECED)
@pytest.mark.parametrize("piece", [16, 48, 112])
def test_pieces_equal_the_whole(name: str, piece: int) -> None:
    draw = PIECED[name]
    shapes = [
        (15,),
        (16,),
        (17,),
        (239,),
        (241,),
        (3, 5, 49),
        (7, 3, 17),
        (2, 3, 5, 7),
        (1, 400),
        (400, 1),
        (33, 16),
    ]
    for shape in shapes:
        for order in orders(shape) if len(shape) > 1 else [(0,)]:
            torch.manual_seed(1)
            want = torch.empty_strided(shape, dense_strides(shape, order))
            draw(want)
            end = random_state()
            for mesh, states in LAYOUTS:
                if any(isinstance(state, int) and state >= len(shape) for state in states):
                    continue
                for _, box in boxes_of(shape, mesh, states):
                    torch.manual_seed(1)
                    got = draw_part(draw, shape, order, torch.float32, device_type(), box, piece_numel=piece)
                    assert torch.equal(got, slice_of(want, box)), (shape, order, box)
                    assert torch.equal(random_state(), end)
                    assert got.stride() == dense_strides(got.shape, order)


@pytest.mark.host("draws in pieces")
def test_pieces_of_large_tensor_with_odd_sizes() -> None:
    for count in (1_000_003, 3 * PIECE_NUMEL + 5):
        for op, rest in (FILLS["normal_"], FILLS["bernoulli_"]):
            torch.manual_seed(4)
            want = op(torch.empty(count), *rest)
            end = random_state()
            box = chunk_box((count,), (4,), (2,), (0,))
            torch.manual_seed(4)
            local = torch.empty(box_shape(box))
            run_random(op, (local, *rest), {}, [Part((count,), (0,), box)])
            assert torch.equal(local, slice_of(want, box))
            assert torch.equal(random_state(), end)


@pytest.mark.host("draws in pieces")
def test_pieces_hold_little_memory() -> None:
    seen: list[int] = []

    def draw(tensor: torch.Tensor) -> None:
        seen.append(tensor.numel())
        tensor.uniform_()

    box = chunk_box((4096, 16), (8,), (0,), (0,))
    draw_part(draw, (4096, 16), (0, 1), torch.float32, device_type(), box, piece_numel=4096)
    assert max(seen) <= 4096 + 16
    seen.clear()
    draw_part(draw, (4096, 16), (0, 1), torch.float32, device_type(), box)
    assert seen == [4096 * 16]


@pytest.mark.host("draws in pieces")
def test_draw_that_pieces_would_change_is_not_split() -> None:
    """A negative control: numbers that depend on how many are drawn."""

    def draw(tensor: torch.Tensor) -> None:
        tensor.uniform_().mul_(tensor.numel())

    torch.manual_seed(1)
    want = torch.empty(64, 8)
    draw(want)
    torch.manual_seed(1)
    box = chunk_box((64, 8), (2,), (1,), (0,))
    got = draw_part(draw, (64, 8), (0, 1), torch.float32, device_type(), box, piece_numel=16)
    assert torch.equal(got, slice_of(want, box))


@pytest.mark.parametrize(
    "init", [nn.init.trunc_normal_, nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_]
)
def test_all_initialisers_can_draw(init: Callable[[torch.Tensor], Any]) -> None:
    shape = (24, 10)
    torch.manual_seed(6)
    want = init(torch.empty(shape))
    end = random_state()
    for mesh, states in LAYOUTS:
        for _, box in boxes_of(shape, mesh, states):
            torch.manual_seed(6)
            got = draw_part(init, shape, (0, 1), torch.float32, device_type(), box)
            assert torch.equal(got, slice_of(want, box))
            assert torch.equal(random_state(), end)


def test_local_draws_differ_from_one_device() -> None:
    """The negative control: what a rank draws for itself is wrong, which is why this module exists."""
    torch.manual_seed(1)
    want = torch.empty(8, 4).normal_()
    torch.manual_seed(1)
    assert not torch.equal(torch.empty(4, 4).normal_(), want[4:])


def test_unsupported_random_ops_are_rejected() -> None:
    assert draws_by_element(aten.normal_.default)
    assert not draws_by_element(aten.multinomial.default)
    part = Part((4, 4), (0, 1), ((0, 2), (0, 4)))
    with pytest.raises(UnsupportedError, match="gather its inputs"):
        run_random(aten.poisson.default, (torch.rand(2, 4),), {}, [part])
    with pytest.raises(UsageError, match="1 tensor arguments and 0 parts"):
        run_random(aten.normal_.default, (torch.rand(2, 4),), {}, [])
    with pytest.raises(UsageError, match="result=Part"):
        run_random(aten.rand.default, ([4, 4],), {}, [])
    with pytest.raises(UsageError, match="dim_order"):
        draw_part(torch.Tensor.normal_, (4, 4), (0, 0), torch.float32, device_type(), part.box)
    with pytest.raises(UsageError, match="multiple of 16"):
        draw_part(torch.Tensor.normal_, (4, 4), (0, 1), torch.float32, device_type(), part.box, piece_numel=5)


def masks(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (world_size * 3, 5)
    box = chunk_box(shape, (world_size,), (rank,), (0,))
    local = torch.empty(box_shape(box))
    run_random(aten.bernoulli_.float, (local, 0.5), {}, [Part(shape, (0, 1), box)])
    return local, random_state()


def test_real_ranks_hold_the_rows_of_one_mask(rank_pool: RankPool) -> None:
    results = rank_pool.run(4, masks)
    torch.manual_seed(0)
    want = torch.empty(12, 5).bernoulli_(0.5)
    assert torch.equal(torch.cat([mask for mask, _ in results]), want)
    assert all(torch.equal(state, random_state()) for _, state in results)
