"""The interface of a read: stored tensors and their files (`Store`), and the boxes that a rank asks for (`Wanted`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from meshwright_dtensor.sharding.boxes import Box


class ReadFile(Protocol):
    """A file that several threads read from."""

    where: str
    nbytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on. Raises CorruptError if it is too short, CheckpointError if it cannot be read."""

    def close(self) -> None:
        """Close."""


@dataclass(frozen=True)
class Fragment:
    """A box of a global tensor as row-major bytes in a file.

    `sums`: checksums of its blocks; "" if there are none (from_pretrained and DCP files).
    """

    box: Box
    file: str
    offset: int
    sums: str = ""


@dataclass(frozen=True)
class Source:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fragments: tuple[Fragment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


class Store(Protocol):
    """An open checkpoint or from_pretrained directory: stored tensors and their files."""

    where: str

    @property
    def tensors(self) -> Mapping[str, Source]:
        """By key."""

    def file(self, name: str) -> ReadFile:
        """An open file with a verified header."""

    def close(self) -> None:
        """Close all files."""


@dataclass(frozen=True)
class Wanted:
    """A box of tensor `key` to read into `target`, a view of its shape. If the dtypes differ, values are cast."""

    key: str
    box: Box
    target: torch.Tensor
