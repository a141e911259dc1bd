"""Small JSON messages between ranks, on the caller's thread; a world of one needs no process group."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright_checkpoint.errors import CheckpointError
from meshwright_dtensor.errors import MeshwrightError

T = TypeVar("T")


class Ranks:
    """The ranks that save or load together: those of the default process group."""

    def __init__(self) -> None:
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.size = dist.get_world_size() if there else 1

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, in rank order, on every rank (two collective calls). Values are JSON."""
        if self.size == 1:
            return [value]
        data = json.dumps(value).encode()
        device = _device()
        lengths = torch.zeros(self.size, dtype=torch.int64, device=device)
        dist.all_gather_single(lengths, torch.tensor([len(data)], device=device))
        longest = int(lengths.max())
        mine = torch.zeros(longest, dtype=torch.uint8, device=device)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = torch.zeros(self.size, longest, dtype=torch.uint8, device=device)
        dist.all_gather_single(parts.view(-1), mine)
        rows = parts.cpu().numpy()
        return [json.loads(rows[r, :n].tobytes()) for r, n in enumerate(lengths.tolist())]

    def together(self, work: Callable[[], T]) -> T:
        """`work()` of this rank, once it has succeeded on every rank; else the first error, on every rank (collective)."""
        value, error = None, None
        try:
            value = work()
        except (MeshwrightError, OSError) as caught:
            error = caught
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            if isinstance(error, OSError):
                raise CheckpointError(f"{type(error).__name__}: {error}") from error
            raise error
        first = next(((rank, text) for rank, text in enumerate(told) if text is not None), None)
        if first is not None:
            raise CheckpointError(f"rank {first[0]} failed: {first[1]}")
        return value  # type: ignore[return-value]


def _device() -> torch.device:
    """Where tensors of the default group's collectives live."""
    backends = str(dist.get_backend())
    if "nccl" in backends and "gloo" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
