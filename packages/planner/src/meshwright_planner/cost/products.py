"""Seconds of a matrix product and of fused attention on an accelerator, by shape.

A product is computed in tiles. Each multiprocessor computes one tile at a time, so the tiles run in waves, and a wave that is not
full takes as long as a full one (NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave quantization). A small tile
loads more operand bytes for each operation than a large one. Where few tiles are left, the summed dimension is split too. Operands
are loaded while others are multiplied; a result is written when its tile is done, so that a product whose result is large for its
work takes longer than either. A product of little arithmetic runs at the pace of the memory (Williams et al., 2009).

The library tries its tiles and takes the fastest; so does this model. On 37 products that OpenXLA measured on an H100
(xla/service/gpu/model/matmul_interpolator_data.h) it is 6% off on average, and 1% on large results of little depth, with 0.803 of
the peak and 3 microseconds for the launch, which a stream of operations hides.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from meshwright_dtensor.cluster import Chip, Cluster

SIDE = 128
"""Side of the smallest square tile that keeps a multiprocessor busy: it loads an element for 64 multiplications."""

SPLITS = (1, 2, 4, 8)
"""Parts into which the summed dimension is split."""

LEAST_DEPTH = 256
"""A part of the summed dimension is at least this long."""

QUERIES = 128
"""Rows of queries in a tile of fused attention (Dao, "FlashAttention-2", 2023, 3.3)."""

EXPONENTIALS = 32
"""Columns of a head whose products take as long as the exponentials of a score, which run at a lower rate (Dao, 2023, 3.1)."""

WIDTH = 128
"""Width of the heads to which `Chip.attention_efficiency` refers."""


class Product(NamedTuple):
    """A `batch` of products of [rows, depth] by [depth, columns], of elements of `itemsize` bytes."""

    rows: int
    columns: int
    depth: int
    batch: int = 1
    itemsize: int = 2

    @staticmethod
    def of(shape: tuple[int, ...], flops: float, batch: int, itemsize: int) -> Product:
        """The product with a result of this shape; its depth follows from its FLOPs."""
        columns = max(1, shape[-1]) if shape else 1
        rows = max(1, math.prod(shape[:-1]) // batch)
        return Product(rows, columns, max(1, round(flops / (2 * rows * columns * batch))), batch, itemsize)

    def even(self) -> Product:
        """As many multiplications with equal sides."""
        side = max(1, round((self.rows * self.columns * self.depth) ** (1 / 3)))
        return Product(side, side, side, self.batch, self.itemsize)

    def gradients(self) -> tuple[Product, Product]:
        """The products that make the gradients of the two operands."""
        rows, columns, depth, batch, itemsize = self
        return Product(rows, depth, columns, batch, itemsize), Product(depth, columns, rows, batch, itemsize)


def product_seconds(cluster: Cluster, product: Product, dtype: str) -> float:
    """Seconds of a product on the cluster's devices, which have a `chip`."""
    assert cluster.chip is not None
    return _seconds(cluster.chip, cluster.rate(dtype), cluster.streams, product)


@lru_cache(maxsize=65536)
def _seconds(chip: Chip, rate: float, streams: float, product: Product) -> float:
    """`rate`: operations per second of large products; `streams`: bytes per second of the memory."""
    rows, columns, depth, batch, _ = product
    each = rate / chip.multiprocessors
    best = math.inf
    for high, wide in chip.tiles:
        tiles = -(-rows // high) * -(-columns // wide) * batch
        loading = max(1.0, (1 / high + 1 / wide) * SIDE / 2)
        for parts in SPLITS:
            if parts > 1 and (tiles * parts > 2 * chip.multiprocessors or depth < parts * LEAST_DEPTH):
                break
            waves = -(-tiles * parts // chip.multiprocessors)
            busy = waves * 2.0 * high * wide * depth / parts * loading / each
            # the parts are written in float32, and read again to be summed
            summed = 8.0 * parts * rows * columns * batch / streams if parts > 1 else 0.0
            best = min(best, busy + summed)
    # a multiprocessor multiplies little while it writes its tile
    written = product.itemsize * batch * rows * columns / streams
    return chip.fill_s + max(math.hypot(best, written), _moved(chip, product) / streams)


def _moved(chip: Chip, product: Product) -> float:
    """Bytes between memory and cache: an operand that the cache does not hold is read again for each block of tiles of a wave."""
    rows, columns, depth, batch, itemsize = product
    side = math.sqrt(chip.multiprocessors * max(high * wide for high, wide in chip.tiles))
    left, right = rows * depth * itemsize, columns * depth * itemsize
    again_left = max(1.0, columns / side) if right > chip.cache_bytes / 2 else 1.0
    again_right = max(1.0, rows / side) if left > chip.cache_bytes / 2 else 1.0
    return batch * (left * again_left + right * again_right + rows * columns * itemsize)


def attention_seconds(cluster: Cluster, shape: tuple[int, ...], flops: float, dtype: str) -> float:
    """Seconds of the forward pass of fused attention; `shape`: of its result, [..., heads, queries, width]."""
    chip = cluster.chip
    assert chip is not None
    width, queries = shape[-1], shape[-2] if len(shape) > 1 else 1
    tiles = max(1, math.prod(shape[:-2])) * -(-queries // QUERIES)
    waves = -(-tiles // chip.multiprocessors)
    # tiles of different length, as causal ones, even out over many waves
    full = tiles / (waves * chip.multiprocessors)
    filled = queries / (-(-queries // QUERIES) * QUERIES)
    narrow = min(1.0, width / (width + EXPONENTIALS) * (WIDTH + EXPONENTIALS) / WIDTH)
    rate = cluster.rate(dtype) * chip.attention_efficiency * narrow
    return chip.fill_s + flops / (rate * full * filled)
