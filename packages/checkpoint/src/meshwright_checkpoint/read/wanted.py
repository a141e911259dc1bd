"""The interface of a read: stored tensors and their files (`Store`), and the boxes that a rank asks for (`Wanted`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright_dtensor.sharding.boxes import Box


class ReadFile(Protocol):
    """A file that parts are read of, from several threads at once."""

    where: str
    nbytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; CorruptError where that is not possible."""

    def close(self) -> None:
        """Close."""


@dataclass(frozen=True)
class Fragment:
    """Bytes in a file that are a box of a tensor, row-major.

    box: of the whole tensor.
    file: name of the file.
    offset: in bytes.
    sums: checksums of its blocks; "" where there are none (files of others).
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


class Store(Protocol):
    """What tensors are read from: a checkpoint of ours, or a directory of `from_pretrained`."""

    where: str

    @property
    def tensors(self) -> Mapping[str, Source]:
        """By key."""

    def file(self, name: str) -> ReadFile:
        """An open file, whose header has been checked."""

    def close(self) -> None:
        """Close all files."""


@dataclass(frozen=True)
class Wanted:
    """A box of tensor `key` that shall be written to `target`, a view of its shape; a dtype of its own means a cast."""

    key: str
    box: Box
    target: torch.Tensor
