"""Ways to draw on GPUs give what torch's kernels do, in a model of these kernels, and draw in proportion to the part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gpu_model
import numpy as np
import pytest
import torch
from gpu_model import Kernels, Stream, uniform2, uniform4

from meshwright_dtensor.drawing import gpu
from meshwright_dtensor.drawing.held import Held, Target
from meshwright_dtensor.drawing.philox import Launch, fused_multiply_add, philox
from meshwright_dtensor.drawing.whole import Draw, Kind, Whole
from meshwright_dtensor.sharding.boxes import Place, copy_region, dense_strides, place_shape, strides_of

pytestmark = pytest.mark.host("a model of a GPU's kernels, computed on the CPU")

THREADS = 512
SEED = (7 << 32) + 12345


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    gpu._verdicts.cache_clear()
    yield
    gpu._verdicts.cache_clear()


def test_known_answers_of_philox() -> None:
    """Of Random123, for counters and keys of zeros and of ones; then words against the plain Python form."""
    ones = 0xFFFFFFFF
    for word, answer in (
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        counter = tuple(torch.tensor([word]) for _ in range(4))
        assert tuple(int(w) for w in philox(counter, (word, word))) == answer  # type: ignore[arg-type]
        assert gpu_model.philox((word,) * 4, (word, word)) == answer
    torch.manual_seed(1)
    words = torch.randint(0, 1 << 32, (4, 50))
    got = torch.stack(philox(tuple(words), (5, 0xABCDEF01)))  # type: ignore[arg-type]
    for column in range(50):
        expected = gpu_model.philox(tuple(words[:, column].tolist()), (5, 0xABCDEF01))
        assert tuple(got[:, column].tolist()) == expected


def test_sums_are_rounded_once() -> None:
    from fractions import Fraction

    torch.manual_seed(2)
    a = torch.rand(3000)
    for b, c in ((3.0, -1.5), (float(np.float32(0.1)), float(np.float32(-0.05))), (2.0**-20, 1.0)):
        got = fused_multiply_add(a, b, c)
        twice = 0
        for x, y in zip(a.tolist(), got.tolist(), strict=True):
            exact = Fraction(x) * Fraction(b) + Fraction(c)
            below, above = (
                np.nextafter(np.float32(y), np.float32(-np.inf)),
                np.nextafter(np.float32(y), np.float32(np.inf)),
            )
            error = abs(Fraction(y) - exact)
            assert error <= min(abs(Fraction(float(z)) - exact) for z in (below, above))
            twice += float(np.float32(np.float32(x) * np.float32(b)) + np.float32(c)) != y
        # the negative control: rounding the product as well gives other numbers
        assert twice or b == 2.0**-20


def float_uniform(kernels: Kernels, dtype: torch.dtype) -> Draw:
    curand = uniform2 if dtype == torch.float64 else uniform4
    return lambda t: kernels.fill(
        t, curand, lambda r: 0.0 if float(torch.tensor(float(r)).to(dtype)) == 1.0 else float(r)
    )


def float_bernoulli(kernels: Kernels, dtype: torch.dtype) -> Draw:
    curand, real = (uniform2, np.float64) if dtype == torch.float64 else (uniform4, np.float32)
    return lambda t: kernels.fill(t, curand, lambda r: float(r < real(0.3)))


def integers(kernels: Kernels, dtype: torch.dtype) -> Draw:
    return lambda t: kernels.fill(t, lambda four: [np.uint64(w) for w in four], lambda w: int(w) % 90 - 7)


def dropout(kernels: Kernels, dtype: torch.dtype) -> Draw:
    return lambda t: kernels.fused_dropout(t, 0.3)


def box_muller(kernels: Kernels, dtype: torch.dtype) -> Draw:
    def normal4(four: tuple[int, int, int, int]) -> list[Any]:
        u = [np.float64(w + 0.5) * 2.0**-32 for w in four]
        pairs = [(np.sqrt(-2 * np.log(x)), 2 * np.pi * y) for x, y in (u[:2], u[2:])]
        return [f(angle) * r for r, angle in pairs for f in (np.sin, np.cos)]

    return lambda t: kernels.fill(t, normal4, float)


KINDS: dict[str, tuple[Callable[[Kernels, torch.dtype], Draw], Kind]] = {
    "uniform": (float_uniform, Kind("uniform_", (0.0, 1.0))),
    "bernoulli": (float_bernoulli, Kind("bernoulli_", (0.3,))),
    "integers": (integers, Kind("random_", (-7, 83))),
    "dropout": (dropout, Kind("dropout_noise_", (0.3,))),
    "normal": (box_muller, Kind("normal_", (0.0, 1.0))),
}
CASES: list[tuple[tuple[int, ...], tuple[int, ...], Place]] = [
    ((37, 301), (0, 1), ((20, 9), (0, 301))),
    ((37, 304), (0, 1), ((0, 37), (299, 5))),
    ((301, 37), (1, 0), ((0, 301), (30, 7))),
    ((30, 302), (0, 1), (((0, 2), (25, 5)), ((3, 40), (290, 12)))),
    ((10, 30), (0, 1), ((5, 5), (0, 30))),
]


def drawn(
    name: str, dtype: torch.dtype, case: tuple[Any, ...], most: int = 2**31 - 1, gaps: bool = False
) -> tuple[Held, int, str, bool]:
    """(the part, elements drawn for it after all trials, the name of its way, whether the numbers are right)."""
    shape, order, place = case
    make, kind = KINDS[name]
    stream = Stream(SEED, 24)
    kernels = Kernels(stream, THREADS, most)
    draw = make(kernels, dtype)
    whole = torch.empty_strided(shape, strides_of(shape, order, gaps), dtype=dtype)
    draw(whole)
    expected, end = copy_region(whole, place), stream.offset
    stream.offset = 24
    described = Whole(
        draw,
        dtype,
        torch.device("cpu"),
        whole.is_contiguous(),
        gaps,
        stream,
        1,
        kind,  # type: ignore[arg-type]
    )
    held = Held.of(shape, order, place)
    way = gpu.chosen(described, held, THREADS)
    assert stream.offset == 24
    if way is None:
        return held, 0, "", False
    local = place_shape(place)
    got = torch.full(local, 77).to(dtype).new_empty(0)
    got = torch.empty_strided(local, dense_strides(local, order), dtype=dtype)
    kernels.drawn = 0
    way(described, held, Target((got.permute(order),)))
    return (
        held,
        kernels.drawn,
        way.__qualname__.split(".")[0],
        torch.equal(got, expected) and stream.offset == end,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_parts_equal_one_device(name: str, dtype: torch.dtype) -> None:
    for case in CASES:
        held, count, way, right = drawn(name, dtype, case)
        assert right, (case, way)
        assert count <= 4 * THREADS * 2 + 3 * held.total


def test_what_is_drawn_grows_with_the_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are drawn in whole waves; of columns, each number is counted up to once that is less."""
    monkeypatch.setattr(gpu, "_COUNTED_COST", 10)
    rows, wave = 400, 4 * THREADS
    for parts in (2, 8, 40):
        share = rows // parts
        held, count, way, right = drawn(
            "uniform", torch.float32, ((rows, 64), (0, 1), ((share, share), (0, 64)))
        )
        assert right
        assert way == "by_waves"
        assert held.numel <= count <= held.numel + 2 * wave
    held, count, way, right = drawn("uniform", torch.float32, ((64, rows), (0, 1), ((0, 64), (3, 10))))
    assert right
    assert (way, count) == ("by_counting", 0)


def test_places_that_are_counted_up_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many words are computed as the rank has elements."""
    seen: list[int] = []
    words = Launch.words
    monkeypatch.setattr(gpu, "_COUNTED_COST", 0)
    monkeypatch.setattr(
        Launch, "words", lambda self, at, *rest: seen.append(at.numel()) or words(self, at, *rest)
    )  # type: ignore[func-returns-value]
    held, _, _, right = drawn("dropout", torch.bfloat16, CASES[1])
    assert right
    # the first is the trial
    assert sum(seen[1:]) == held.numel


@pytest.mark.parametrize("cost", [0, 10**9])
def test_tensors_that_several_kernels_fill(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those above 2 GiB; here above 14000 bytes."""
    monkeypatch.setattr(gpu, "_COUNTED_COST", cost)
    monkeypatch.setattr(gpu, "_MOST_OFFSET", 14_000)
    for case in CASES[:4]:
        for gaps in (False, True):
            _, _, way, right = drawn("uniform", torch.float32, case, 14_000, gaps)
            assert right, way
    # where torch halves them otherwise, the trial shows it, and the whole is drawn
    gpu._verdicts.cache_clear()
    assert drawn("uniform", torch.float32, CASES[0], 9_000)[2] == ""


def test_another_device_is_not_believed() -> None:
    """The negative control: kernels that start another number of threads than torch's headers say."""
    shape, order, place = CASES[0]
    stream = Stream(SEED)
    kernels = Kernels(stream, THREADS + 256)
    whole = Whole(
        float_uniform(kernels, torch.float32), torch.float32, torch.device("cpu"), True, False, stream, 1,  # type: ignore[arg-type]
        Kind("uniform_", (0.0, 1.0)),
    )  # fmt: skip
    assert gpu.chosen(whole, Held.of(shape, order, place), THREADS) is None
