"""Draws that take one number for a whole tensor, as the kernels of MKL do on Intel processors, in a model of these."""

from __future__ import annotations

import pytest
import torch

from meshwright_dtensor.drawing import cpu
from meshwright_dtensor.random import draw_part
from meshwright_dtensor.sharding.boxes import Place, copy_region

pytestmark = pytest.mark.host("how the CPU draws in pieces")

DRAWN: list[int] = []
MODULUS = 2**31 - 1


def words() -> int:
    """The next two words of the default generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))


def one_word() -> int:
    state = torch.get_rng_state()
    word = words() >> 32 & 0xFFFFFFFF
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int32).random_()
    return word


def bernoulli(tensor: torch.Tensor) -> torch.Tensor:
    """``bernoulli_(0.3)`` of one seed: of two words in float64, of which the low one counts."""
    seed = words() & 0xFFFFFFFF if tensor.dtype == torch.float64 else one_word()
    x, values = seed % MODULUS or 1, []
    for _ in range(tensor.numel()):
        values.append(float(x < 0.3 * MODULUS))
        x = x * 1132489760 % MODULUS
    DRAWN.append(tensor.numel())
    # in the order of its dims, whatever its memory
    return tensor.copy_(torch.tensor(values).view(tensor.shape))


@pytest.mark.parametrize("word", [1, 123456789, 2**31 - 2])
def test_a_state_gives_any_word(word: int) -> None:
    torch.manual_seed(5)
    torch.rand(3)
    torch.set_rng_state(cpu._state_before(torch.get_rng_state(), word))
    assert words() == (word << 32) + word


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_equal_one_device(dtype: torch.dtype) -> None:
    shape = (200, 37)
    places: tuple[Place, ...] = (
        ((150, 20), (0, 37)),
        ((0, 200), (30, 5)),
        (((0, 3), (90, 9)), ((1, 2), (30, 7))),
    )
    for seed, place in enumerate(places):
        torch.manual_seed(seed)
        whole = bernoulli(torch.empty(shape, dtype=dtype))
        end = torch.get_rng_state()
        torch.manual_seed(seed)
        DRAWN.clear()
        got = draw_part(bernoulli, shape, (0, 1), dtype, "cpu", place, piece_numel=64)
        assert torch.equal(got, copy_region(whole, place))
        assert torch.equal(torch.get_rng_state(), end)
        assert shape[0] * shape[1] not in DRAWN


def test_what_is_not_contiguous_is_drawn_whole() -> None:
    """The negative control: such a kernel goes through the dims, and pieces of memory would have other numbers."""
    shape, place = (200, 37), ((150, 20), (0, 37))
    torch.manual_seed(1)
    whole = bernoulli(torch.empty(37, 200).t())
    torch.manual_seed(1)
    DRAWN.clear()
    got = draw_part(bernoulli, shape, (1, 0), torch.float32, "cpu", place, piece_numel=64)
    assert torch.equal(got, copy_region(whole, place))
    assert shape[0] * shape[1] in DRAWN
