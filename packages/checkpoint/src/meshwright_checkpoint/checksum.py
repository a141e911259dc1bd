"""The checksum of blocks: two sums of products modulo 2**64, at the speed of memory.

A block is at most one MiB, seen as little-endian 64-bit words ``w[i]``, the last one padded with zero bytes.  With fixed
pseudo-random odd numbers ``a[i]`` and ``b[i]`` its checksum is

    sum(a[i] * w[i])  and  sum(b[i] * (w[i] >> 32)),   modulo 2**64, as 32 hexadecimal digits.

Either a high half of some word changed, and the second sum is a multilinear hash of those halves, or only low halves did,
and the first sum is one of them: an error goes unseen with probability 2**-32, a single changed bit never.  zlib's CRC-32
is eight times slower here and would cost more than the disk does.

Source: Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal, 2014 (multilinear hashing).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
"""Bytes of a block."""
DIGITS = 32
"""Hexadecimal digits of its checksum."""

_WORDS = BLOCK // 8
_GOLDEN = 0x9E3779B97F4A7C15


@cache
def _factors() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """a and b: the outputs of splitmix64 from state 0, with the lowest bit set; first all of a, then all of b."""
    with np.errstate(over="ignore"):
        z = np.arange(1, 2 * _WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return z[:_WORDS], z[_WORDS:]


def block_sum(data: memoryview | bytes, high: NDArray[np.uint64] | None = None) -> str:
    """The checksum of one block of at most BLOCK bytes; `high`: memory for as many words, if there is any to use again."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.size % 8 or raw.ctypes.data % 8:
        padded = np.zeros(-(-raw.size // 8) * 8, dtype=np.uint8)
        padded[: raw.size] = raw
        raw = padded
    words = raw.view("<u8")
    a, b = _factors()
    n = words.size
    # einsum's inner loop uses vector registers for integers, dot's does not
    first = int(np.einsum("i,i->", a[:n], words))
    shifted = np.right_shift(words, np.uint64(32), out=None if high is None else high[:n])
    second = int(np.einsum("i,i->", b[:n], shifted))
    return f"{first:016x}{second:016x}"


def block_sums(data: memoryview) -> str:
    """The checksums of the blocks of `data`, one after the other; the last block may be short."""
    high = np.empty(min(_WORDS, -(-len(data) // 8)), dtype=np.uint64)
    return "".join(block_sum(data[at : at + BLOCK], high) for at in range(0, len(data), BLOCK))
