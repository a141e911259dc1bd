"""What each model learns from bytes: a text, and datasets whose row `i` is always the same, whoever asks for it.

A row is drawn by a generator of its own, seeded by (seed, row): loading never touches the random numbers that the
model's dropout uses, and any rank can load any part of a batch.
"""

from __future__ import annotations

import string
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UsageError

BYTES = 256
# the one symbol that no byte uses
MASK = BYTES
IMAGE_SIZE = 32
IGNORED = -100
# bytes of a text: enough for any run of the demo, read in well under a second
LIMIT = 8 << 20


def read_text(path: str | Path | None = None, *, at_least: int = 1) -> Tensor:
    """The bytes of `path`, or of the standard library's top-level modules, as a uint8 tensor of at most `LIMIT` elements.

    at_least: how many bytes the caller needs.
    Raises UsageError: the file is missing, unreadable or too short.
    """
    if path is None:
        folder, data = Path(sysconfig.get_path("stdlib")), b""
        for file in sorted(folder.glob("*.py")):
            data += file.read_bytes()
            if len(data) >= LIMIT:
                break
        if not data:
            raise UsageError(f"there are no sources in {folder}; give a file with --text")
        data = data[:LIMIT]
    else:
        try:
            with open(path, "rb") as source:
                data = source.read(LIMIT)
        except OSError as error:
            text = f"--text {path} cannot be read ({error.strerror}); give a readable text file"
            raise UsageError(text) from error
    if len(data) < at_least:
        raise UsageError(
            f"--text {path} has {len(data)} bytes: training needs at least {at_least}; "
            "give a longer file or a smaller --sequence-length"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _Rows(Dataset[dict[str, Tensor]]):
    """Rows drawn from a text; a subclass gives the bytes of a row and turns them into a training sample.

    text: uint8 of shape (n,). length: tokens of a row. rows: how many rows there are.
    fixed: rows are of one size, whatever the length.
    """

    fixed: ClassVar[bool] = False

    def __init__(self, text: Tensor, length: int, rows: int, seed: int) -> None:
        self.text, self.length, self.rows, self.seed = text, length, rows, seed

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        needed = self.bytes_per_row(self.length)
        start = int(torch.randint(len(self.text) - needed + 1, (), generator=generator, device=HOST))
        return self.row(self.text[start : start + needed].long(), generator)

    @staticmethod
    def bytes_per_row(length: int) -> int:
        return length

    def row(self, window: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        raise NotImplementedError(f"{type(self).__name__} must say what a row is")


class NextByte(_Rows):
    """Causal language modelling: input_ids and labels, int64 (length,); the model shifts the labels."""

    def row(self, window: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"input_ids": window, "labels": window.clone()}


class MaskedByte(_Rows):
    """Masked language modelling: 15% of the bytes are hidden and asked for; the other labels are ignored."""

    def row(self, window: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        hidden = torch.rand(window.shape, generator=generator, device=HOST) < 0.15
        return {
            "input_ids": window.masked_fill(hidden, MASK),
            "attention_mask": torch.ones_like(window),
            "labels": window.masked_fill(~hidden, IGNORED),
        }


class ByteImage(_Rows):
    """Images of bytes: pixel_values float32 (1, 32, 32) from 1024 bytes; the label is the kind of the byte after them."""

    KINDS = 6
    fixed = True

    @staticmethod
    def bytes_per_row(length: int) -> int:
        return IMAGE_SIZE * IMAGE_SIZE + 1

    def row(self, window: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        pixels = window[:-1].float().reshape(1, IMAGE_SIZE, IMAGE_SIZE) / 127.5 - 1.0
        return {"pixel_values": pixels, "labels": kind_of_byte(window[-1])}


def kind_of_byte(byte: Tensor) -> Tensor:
    """int64 of the same shape: 0 space, 1 line end, 2 alphabetic, 3 digit, 4 bracket or quote, 5 anything else."""
    table, alphabetic = torch.full((BYTES,), 5, device=HOST), string.ascii_letters.encode() + b"_"
    for kind, members in enumerate((b" \t", b"\r\n", alphabetic, b"0123456789", b"()[]{}'\"")):
        table[list(members)] = kind
    return table[byte]


def loader(rows: _Rows, batch_size: int) -> DataLoader[dict[str, Tensor]]:
    """Batches in order. The generator is given so that iterating does not draw from the model's random numbers."""
    return DataLoader(rows, batch_size=batch_size, generator=torch.Generator().manual_seed(0), drop_last=True)


def batches(rows: _Rows, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """The same batches without a loader: what one device sees."""
    for start in range(0, len(rows) - batch_size + 1, batch_size):
        items = [rows[index] for index in range(start, start + batch_size)]
        yield {name: torch.stack([item[name] for item in items]) for name in items[0]}
