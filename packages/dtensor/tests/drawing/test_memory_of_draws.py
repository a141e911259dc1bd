"""The numbers of one device take no more than a piece beyond the rank's part, whatever the operation, dtype and layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_dtensor import random
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.random import MOST_BYTES, PIECE_NUMEL, Part, draw_part, run_random
from meshwright_dtensor.rules.composites.dropout import noise_
from meshwright_dtensor.sharding.boxes import (
    Place,
    copy_region,
    dense_strides,
    dim_order_of,
    place_shape,
    strides_of,
)

pytestmark = pytest.mark.host("how the CPU draws in pieces")

aten = torch.ops.aten
PIECE = 1 << 14
BOUND = MOST_BYTES // PIECE_NUMEL * PIECE
"""The 64 MiB of a draw, for pieces that are as much smaller."""
SHAPE = (96, 40, 96)
PLACES: dict[str, tuple[tuple[int, ...], Place]] = {
    "rows": ((0, 1, 2), ((24, 24), (0, 40), (0, 96))),
    "columns": ((0, 1, 2), ((0, 96), (0, 40), (48, 12))),
    "both, not in the order of memory": ((2, 0, 1), ((48, 48), (0, 40), (90, 6))),
    "intervals": ((0, 1, 2), (((0, 5), (50, 11)), ((3, 20),), ((0, 7), (31, 2), (90, 6)))),
    "intervals, not in the order of memory": ((1, 2, 0), (((0, 96),), ((0, 2), (30, 9)), ((5, 40),))),
    "none": ((0, 1, 2), ((0, 96), (40, 0), (0, 96))),
}

TWO = ("columns", "intervals, not in the order of memory")


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return out

    def freed(self, key: int, nbytes: int) -> None:
        """A storage is gone."""
        self.seen.discard(key)
        self.live -= nbytes


@contextmanager
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "PIECE_NUMEL", PIECE)
        yield


def check(full: Callable[[], Any], local: Callable[[], Any], place: Place, results: int) -> None:
    """`local` gives the part of `full`, and holds at most BOUND beyond `results` bytes."""
    torch.manual_seed(3)
    expected = full()
    end = torch.get_rng_state()
    torch.manual_seed(3)
    with small_pieces(), Peak() as peak:
        got = local()
    assert torch.equal(torch.get_rng_state(), end)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
        part = copy_region(b, place)
        assert torch.equal(a, part)
        assert a.dtype == part.dtype
    assert peak.peak <= BOUND + results


FILLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.normal_.default, (1.0, 2.0)),
    (aten.uniform_.default, (-1.0, 3.0)),
    (aten.exponential_.default, (0.7,)),
    (aten.random_.default, ()),
    (aten.random_.to, (100,)),
    (aten.log_normal_.default, (0.1, 0.3)),
    (aten.cauchy_.default, ()),
    (aten.geometric_.default, (0.4,)),
    (aten.bernoulli_.float, (0.3,)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("op", "rest"), FILLS, ids=lambda value: str(value))
def test_fills(op: Any, rest: tuple[Any, ...], dtype: torch.dtype) -> None:
    normal = op is aten.normal_.default and dtype == torch.float32
    for name in PLACES if normal else TWO:
        order, place = PLACES[name]
        whole = torch.empty_strided(SHAPE, dense_strides(SHAPE, order), dtype=dtype)
        local = copy_region(whole, place)
        check(
            partial(op, whole, *rest),
            partial(run_random, op, (local, *rest), {}, [Part(SHAPE, order, place)]),
            place,
            0,
        )


def test_a_tensor_with_gaps() -> None:
    order, place = PLACES["both, not in the order of memory"]
    strides = strides_of(SHAPE, order, True)
    storage = torch.empty_strided(SHAPE, strides)
    local = copy_region(storage, place)
    spread = torch.empty_strided(local.shape, strides_of(tuple(local.shape), order, True))
    part = Part(SHAPE, order, place)
    for op, rest in FILLS:
        check(partial(op, storage, *rest), partial(run_random, op, (spread, *rest), {}, [part]), place, 0)


FUNCTIONS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.rand_like.default, (), {}),
    (aten.randn_like.default, (), {"dtype": torch.float64, "memory_format": torch.contiguous_format}),
    (aten.randint_like.low_dtype, (-3, 40), {"dtype": torch.int64}),
    (aten.bernoulli.default, (), {}),
    (aten.bernoulli.p, (0.2,), {}),
    (aten.native_dropout.default, (0.4, True), {}),
    (aten.normal.Tensor_float, (0.5,), {}),
    (aten.normal.float_Tensor, (), {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("op", "rest", "kwargs"), FUNCTIONS, ids=str)
def test_functions_of_tensors(
    op: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    before = (0.5,) if op is aten.normal.float_Tensor else ()
    for name in TWO:
        order, place = PLACES[name]
        whole = torch.empty_strided(SHAPE, dense_strides(SHAPE, order), dtype=dtype)
        whole.copy_(torch.linspace(0, 1, whole.numel()).view(SHAPE))
        local = copy_region(whole, place)
        part = Part(SHAPE, order, place)
        # results of at most 8 bytes an element, and the mask of dropout
        check(
            partial(op, *before, whole, *rest, **kwargs),
            partial(run_random, op, (*before, local, *rest), kwargs, [part]),
            place,
            local.numel() * 9,
        )


def test_probabilities_of_another_shape() -> None:
    order, place = PLACES["both, not in the order of memory"]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        p = torch.linspace(0, 1, SHAPE[2], dtype=dtype)
        whole = torch.empty_strided(SHAPE, dense_strides(SHAPE, order))
        local, of_p = copy_region(whole, place), copy_region(p, place[2:])
        parts = [Part(SHAPE, order, place), Part(SHAPE[2:], (0,), place[2:])]
        check(
            partial(aten.bernoulli_.Tensor, whole, p),
            partial(run_random, aten.bernoulli_.Tensor, (local, of_p), {}, parts),
            place,
            0,
        )


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.rand.default, (list(SHAPE),)),
        (aten.randn.default, (list(SHAPE),)),
        (aten.randint.low, (2, 9, list(SHAPE))),
        (aten.normal.float_float, (0.0, 2.0, list(SHAPE))),
    ],
    ids=str,
)
def test_factories(op: Any, args: tuple[Any, ...]) -> None:
    order, place = PLACES["columns"]
    result = Part(SHAPE, order, place)
    numel = torch.Size(place_shape(place)).numel()
    check(lambda: op(*args), lambda: run_random(op, args, {}, [], result), place, numel * 8)


def test_a_permutation_is_drawn_whole_or_refused() -> None:
    size = MOST_BYTES // 8 * 2
    part = Part((size,), (0,), ((0, size // 4),))
    with pytest.raises(UnsupportedError, match="draw it replicated"):
        run_random(aten.randperm.default, (size,), {}, [], part)


def test_masks_of_dropout() -> None:
    order, place = PLACES["columns"]
    whole = torch.ones(SHAPE)
    local = torch.Size(place_shape(place)).numel()
    check(
        lambda: F.dropout(whole, 0.3),
        lambda: draw_part(
            lambda full: noise_(full, 0.3),
            SHAPE,
            order,
            whole.dtype,
            "cpu",
            place,
            piece_numel=random.PIECE_NUMEL,
        ),
        place,
        local * 4,
    )


def test_drawing_the_whole_takes_more_than_the_bound() -> None:
    """A negative control of the count of bytes, and of the warning that says so."""
    order, place = PLACES["rows"]
    with Peak() as peak:
        draw_part(lambda full: full.normal_(), SHAPE, order, torch.float64, "cpu", place)
    assert peak.peak > BOUND + 8 * torch.Size(place_shape(place)).numel()

    def by_count(tensor: torch.Tensor) -> None:
        tensor.uniform_().mul_(tensor.numel())

    shape = (MOST_BYTES // 4 + 4 * PIECE_NUMEL,)
    with pytest.warns(UserWarning, match="drawn whole on every rank"):
        draw_part(by_count, shape, (0,), torch.float32, "cpu", ((0, 4),), piece_numel=PIECE_NUMEL)


def test_the_gradient_is_that_of_the_operation() -> None:
    order, place = PLACES["columns"]
    part = Part(SHAPE, order, place)
    mean = torch.zeros(place_shape(place), requires_grad=True)
    with small_pieces():
        run_random(aten.normal.Tensor_float, (mean, 1.0), {}, [part]).sum().backward()
        assert mean.grad is not None
        assert not mean.grad.any()
        scaled = mean * 2
        run_random(aten.normal_.default, (scaled,), {}, [part])
        scaled.sum().backward()
    assert not mean.grad.any()
    assert dim_order_of(scaled) == order
