"""Numbers at any places of a tensor, as torch's kernels on GPUs draw them: Philox 4x32-10, counted up to the place.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the places are those of torch's
DistributionTemplates.h and Dropout.cu. All of it is torch operations on integers of 64 bits, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright_dtensor.utils.host import HOST

Tensor = torch.Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_INVERSE = 2.0**-32
BLOCK = 256
"""Threads of a block."""
CALL = 4
"""Numbers that a call of the generator yields, and by which the offset of a stream is counted."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words (0 to 2**32 - 1, int64) of each counter, whose words have that form too."""
    c0, c1, c2, c3 = counter
    for turn in range(_ROUNDS):
        k0, k1 = ((k + turn * w) & _LOW for k, w in zip(key, _WEYL, strict=True))
        # products wrap at 64 bits, and their two halves are right all the same
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Launch:
    """How torch launches a kernel that draws.

    Attributes:
        most_threads: that run at a time on the device, in whole blocks.
        unroll: elements of a thread for each call of the generator; 4, or 2 where each takes two words.
        vector: elements side by side in memory that a thread draws together; 1 where its elements are a grid apart.
        halved: a tensor whose bytes 32 bits cannot count is drawn by several kernels.
    """

    most_threads: int
    unroll: int = 4
    vector: int = 1
    halved: bool = True

    def threads(self, numel: int) -> int:
        """Threads for so many elements."""
        return min(self.most_threads, -(-numel // BLOCK) * BLOCK)

    def advance(self, numel: int) -> int:
        """By how much the offset of the stream grows."""
        return ((numel - 1) // (self.threads(numel) * self.unroll) + 1) * CALL

    def words(self, places: Tensor, numel: int, seed: int, offset: int) -> list[Tensor]:
        """The words of the elements at these places of `numel`: one tensor, or two where `unroll` is 2."""
        threads = self.threads(numel)
        if self.vector == 1:
            inside = places % (threads * self.unroll)
            call, thread, number = places // (threads * self.unroll), inside % threads, inside // threads
        else:
            inside, calls = places % (threads * self.vector), max(self.vector // CALL, 1)
            thread, number = inside // self.vector, inside % self.vector
            call, number = places // (threads * self.vector) * calls + number // CALL, number % CALL
        at = call + offset // CALL
        zero = torch.zeros((), dtype=torch.int64, device=places.device)
        counter = (at & _LOW, (at >> 32) & _LOW, thread, zero)
        w0, w1, w2, w3 = philox(counter, (seed & _LOW, seed >> 32 & _LOW))
        if self.unroll == CALL or self.vector > 1:
            first = number % 2 == 0
            return [torch.where(number < 2, torch.where(first, w0, w1), torch.where(first, w2, w3))]
        return [torch.where(number == 0, w0, w2), torch.where(number == 0, w1, w3)]


Law = Callable[[list[Tensor]], Tensor]
"""Words -> values."""


def uniform01(words: list[Tensor]) -> Tensor:
    """As curand_uniform, float32 in (0, 1]; of two words curand_uniform2_double, float64."""
    if len(words) == 1:
        return words[0].to(torch.float32) * _INVERSE + _INVERSE / 2
    exact = words[0] ^ (words[1] << 21)
    return exact.to(torch.float64) * 2.0**-53 + 2.0**-54


def fused_multiply_add(a: Tensor, b: float, c: float) -> Tensor:
    """a * b + c of float32, rounded once, as GPUs compute it; `b` and `c` are float32 numbers."""
    product = a.to(torch.float64) * b
    total = product + c
    other = total - product
    error = (product - (total - other)) + (c - other)
    # rounded to odd in float64, so that the second rounding is that of the exact sum
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & (bits % 2 == 0), bits + step, bits)
    return odd.view(torch.float64).to(torch.float32)


def uniform(low: float, high: float, dtype: torch.dtype) -> Law | None:
    """``uniform_(low, high)``; None in float64 with other bounds than 0 and 1, whose rounding is not known."""
    start, end = (torch.tensor(x, dtype=dtype, device=HOST) for x in (low, high))
    width, first, last = float(end - start), float(start), float(end)
    if dtype == torch.float64 and (first, width) != (0.0, 1.0):
        return None

    def law(words: list[Tensor]) -> Tensor:
        drawn = uniform01(words)
        if (first, width) != (0.0, 1.0):
            drawn = fused_multiply_add(drawn, width, first)
        drawn = drawn.to(dtype)
        return torch.where(drawn == last, first, drawn)

    return law


def bernoulli(p: float, dtype: torch.dtype, value: Tensor | None = None, wide: bool = False) -> Law:
    """`value` (by default 1; of the CPU, without dims) with probability `p`, else 0.

    `p` is compared as a float32, or as a float64 where the numbers are float64, or with `wide`.
    """

    def law(words: list[Tensor]) -> Tensor:
        drawn = uniform01(words)
        # made on the device: a copy would wait for it
        limit = torch.full((), p, dtype=torch.float64 if wide else drawn.dtype, device=drawn.device)
        kept = (drawn.to(limit.dtype) < limit).to(dtype)
        return kept if value is None else kept * value

    return law


def integers(low: int, high: int, dtype: torch.dtype) -> Law | None:
    """``random_(low, high)``; None of 2**28 numbers and more, which take two words."""
    if not 0 < high - low < 1 << 28:
        return None
    return lambda words: (words[0] % (high - low) + low).to(dtype)
