"""The processor of an accelerator as numbers: how many multiprocessors, the tiles of its matrix products, its cache. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1)]

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of a result that one multiprocessor computes at a time, in the libraries for matrix products (NVIDIA, "Matrix
Multiplication Background User's Guide")."""


@dataclass(frozen=True)
class Chip:
    """What the time of a matrix product follows from, besides peaks and bandwidth.

    Args:
        multiprocessors: number of units that each compute one tile of a result at a time.
        cache_bytes: the last cache before the memory, shared by all multiprocessors.
        attention_efficiency: rate of the fused attention kernel with heads of 128 and long sequences, as a part of the rate of
            large products.
        fill_s: seconds in which a kernel fills its pipelines and writes its last tiles, besides the launch, which the one before
            hides.
        tiles: the tiles that the library chooses from, (rows, columns).
    """

    multiprocessors: Count
    cache_bytes: Count
    attention_efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    fill_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3e-6
    tiles: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)] = TILES
