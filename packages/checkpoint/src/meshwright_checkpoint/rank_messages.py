"""Small JSON messages between ranks, on the caller's thread. A single rank needs no process group."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright_checkpoint.errors import CheckpointError, error_of_rank
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.mesh.mesh import message_device

T = TypeVar("T")
INLINE_NBYTES = 1016
"""Bytes of a message that are sent with its length."""


class Ranks:
    """The ranks that save or load together: those of `group`, by default of the default process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        if group is None and initialized:
            group = dist.group.WORLD
        self.group = group
        self.rank = dist.get_rank(group) if initialized else 0
        self.size = dist.get_world_size(group) if initialized else 1

    @property
    def device(self) -> torch.device:
        """Device of the tensors of collectives."""
        return message_device(self.group) if self.size > 1 else torch.device("cpu")

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
        padded = torch.zeros(nbytes, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = torch.empty(self.size * nbytes, dtype=torch.uint8, device=device)
        dist.all_gather_single(parts, padded.to(device), group=self.group)
        return [row.tobytes() for row in parts.cpu().view(self.size, nbytes).numpy()]

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
        self.gather_checked(lambda: results.append(work()))
        return results[0]

    def run_on_first(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0. If it fails, every rank raises (collective)."""
        self.run_checked(lambda: work() if self.rank == 0 else None)
