"""Small JSON messages between ranks, on the caller's thread. A single rank needs no process group.

`gather` costs every rank a KiB or more for each rank, and `gather_numbers` 8 bytes. The others cost a rank the same in a world of
any size: `most`, `first`, `same`, `digest`, and of `to_first` and `from_first` all ranks but the first.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright_checkpoint.errors import CheckpointError, error_of_rank
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.mesh.mesh import control_group, message_device

T = TypeVar("T")
INLINE_NBYTES = 1016
"""Bytes of a message that are sent with its length."""


class Ranks:
    """The ranks that save or load together: those of `group`, by default all ranks, in a group for such messages alone.

    Made by all ranks together.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        if group is None and initialized:
            group = control_group() if dist.get_world_size() > 1 else dist.group.WORLD
        self.group = group
        self.rank = dist.get_rank(group) if initialized else 0
        self.size = dist.get_world_size(group) if initialized else 1

    @property
    def device(self) -> torch.device:
        """Device of the tensors of collectives."""
        return message_device(self.group) if self.size > 1 else HOST

    def gather(self, value: Any) -> list[Any]:
        """All-gather a JSON value, in rank order: one collective, or two for long values."""
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        rows = self._gather_bytes(len(data).to_bytes(8, "little") + data[:INLINE_NBYTES], 8 + INLINE_NBYTES)
        lengths = [int.from_bytes(row[:8], "little") for row in rows]
        if max(lengths) > INLINE_NBYTES:
            rest = self._gather_bytes(data[INLINE_NBYTES:], max(lengths) - INLINE_NBYTES)
            rows = [row + more for row, more in zip(rows, rest, strict=True)]
        return [json.loads(row[8 : 8 + n]) for row, n in zip(rows, lengths, strict=True)]

    def _gather_bytes(self, data: bytes, nbytes: int) -> list[bytes]:
        """All-gather `data`, padded to `nbytes`."""
        device = self.device
        parts = torch.empty(self.size * nbytes, dtype=torch.uint8, device=device)
        dist.all_gather_single(parts, _row(data, nbytes, device), group=self.group)
        return [row.tobytes() for row in parts.to(HOST).view(self.size, nbytes).numpy()]

    def gather_numbers(self, number: int) -> list[int]:
        """All-gather a number of at most 63 bits, in rank order: 8 bytes of each rank."""
        if self.size == 1:
            return [number]
        numbers = torch.empty(self.size, dtype=torch.int64, device=self.device)
        dist.all_gather_single(numbers, torch.tensor([number], device=self.device), group=self.group)
        result: list[int] = numbers.tolist()
        return result

    def wait_for_all(self) -> None:
        """Return once every rank has called this."""
        self.most([0])

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks; values are at most 62 bits long."""
        return self._reduced(values, dist.ReduceOp.MAX) if self.size > 1 else list(values)

    def _reduced(self, values: Sequence[int], op: Any) -> list[int]:
        numbers = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(numbers, op, group=self.group)
        result: list[int] = numbers.tolist()
        return result

    def same(self, value: Any) -> bool:
        """Whether all ranks have the same JSON value."""
        (number,) = _words(json.dumps(value), 1)
        largest, negated = self.most([number, -number])
        return largest == -negated

    def digest(self, text: str) -> str:
        """A digest of the texts of all ranks in their order."""
        words = _words(f"{self.rank} {text}", 4)
        # sums of 2 ** 17 words of 46 bits are no longer than an int64
        return " ".join(map(str, self._reduced(words, dist.ReduceOp.SUM) if self.size > 1 else words))

    def first(self, value: Any) -> Any:
        """The JSON value of rank 0."""
        if self.size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        (length,) = self.most([len(data)])
        row = _row(data, length, self.device)
        dist.broadcast(row, self._source, group=self.group)
        return json.loads(row.to(HOST).numpy().tobytes()) if length else value

    def to_first(self, value: Any) -> list[Any] | None:
        """The JSON values of all ranks on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        data = zlib.compress(json.dumps(value).encode(), 1)
        (length,) = self.most([len(data)])
        row = _row(len(data).to_bytes(8, "little") + data, 8 + length, self.device)
        rows = None
        if self.rank == 0:
            rows = list(torch.empty(self.size, len(row), dtype=torch.uint8, device=self.device))
        dist.gather(row, rows, self._source, group=self.group)
        return None if rows is None else [_value(each) for each in rows]

    def from_first(self, values: Sequence[Any] | None) -> Any:
        """This rank's one of the JSON values that rank 0 gives, one for each rank; None on the others."""
        if values is not None and self.size == 1:
            return values[0]
        messages = [zlib.compress(json.dumps(value).encode(), 1) for value in values or ()]
        (length,) = self.most([max(map(len, messages), default=0)])
        row = _row(b"", 8 + length, self.device)
        rows = [_row(len(m).to_bytes(8, "little") + m, len(row), self.device) for m in messages]
        dist.scatter(row, rows or None, self._source, group=self.group)
        return _value(row)

    @property
    def _source(self) -> int:
        """The number of the first rank among all ranks."""
        return dist.get_global_rank(self.group, 0) if self.group is not None else 0

    def gather_checked(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank and gather its JSON results. If any rank fails, every rank raises (collective)."""
        value, error = None, None
        try:
            value = work()
        except (MeshwrightError, OSError) as caught:
            error = caught
        gathered = self.gather([None if error is None else f"{type(error).__name__}: {error}", value])
        if isinstance(error, OSError):
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(gathered):
            if text is not None:
                raise error_of_rank(rank, text)
        return [result for _, result in gathered]

    def run_checked(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result. If any rank fails, every rank raises (collective)."""
        results: list[T] = []
        error = None
        try:
            results.append(work())
        except (MeshwrightError, OSError) as caught:
            error = caught
        if self.most([error is not None]) == [0]:
            return results[0]

        def again() -> None:
            if error is not None:
                raise error

        self.gather_checked(again)
        raise AssertionError("a rank failed and did not say so")

    def run_on_first(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0. If it fails, every rank raises (collective)."""
        self.run_checked(lambda: work() if self.rank == 0 else None)

    def result_of_first(self, work: Callable[[], Any]) -> Any:
        """The JSON result of `work` on rank 0, on every rank. If it fails, every rank raises (collective)."""
        return self.first(self.run_checked(lambda: work() if self.rank == 0 else None))


def _words(text: str, number: int) -> list[int]:
    """A digest of a text as numbers of 46 bits."""
    data = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(data[8 * i : 8 * i + 8], "little") >> 18 for i in range(number)]


def _row(data: bytes, nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes as a tensor, with zeros up to `nbytes`."""
    row = torch.zeros(nbytes, dtype=torch.uint8, device=HOST)
    if data:
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return row.to(device)


def _value(row: torch.Tensor) -> Any:
    """The JSON value of a compressed message that begins with its length."""
    data = row.to(HOST).numpy().tobytes()
    return json.loads(zlib.decompress(data[8 : 8 + int.from_bytes(data[:8], "little")]))
