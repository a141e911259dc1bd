"""The bytes of this rank's file: copied to a host buffer, or taken from the model's own memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch

from meshwright_checkpoint.format.safetensors_file import FileLayout
from meshwright_checkpoint.io.host_memory import ReservedMemory, new_memory
from meshwright_checkpoint.shards.local_shards import LocalShards
from meshwright_dtensor.devices import HOST, device_of, on_host


class StagingBuffer:
    """A host buffer that all saves reuse; pinned if tensors are copied from a device that has pinned memory."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=HOST)
        self._for: torch.device | None = None
        self._reserved: ReservedMemory | None = None

    def prepare(self, nbytes: int, shards: Mapping[str, LocalShards]) -> None:
        """Allocate memory for a file of about `nbytes` in the background. The buffer must not be in use."""
        device = _accelerator(shards)
        if not self._reuse(nbytes, device):
            self._reserved = ReservedMemory(nbytes, device)

    def prepared(self) -> None:
        """Wait for the allocation that `prepare` started."""
        if self._reserved is not None:
            self._reserved.ready()

    def take(self, body: FileLayout, shards: Mapping[str, LocalShards]) -> list[torch.Tensor]:
        """Copy the file: the bytes of the header and of each piece. Valid until the next call."""
        device = _accelerator(shards)
        if not self._reuse(body.nbytes, device):
            self._buffer = new_memory(body.nbytes, device)
            self._for = device
        return copy_file(self._buffer[: body.nbytes], body, shards)

    def _reuse(self, nbytes: int, device: torch.device | None) -> bool:
        """Switch to the reserved memory, if any. Then free the buffer if it is too small, and return False."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None and (memory := reserved.take()) is not None:
            self._buffer, self._for = memory, reserved.device
        fits = self._buffer.numel() >= nbytes and (device is None or self._for == device)
        if not fits:
            self._buffer = torch.empty(0, dtype=torch.uint8, device=HOST)
        return fits


def copy_file(file: torch.Tensor, body: FileLayout, shards: Mapping[str, LocalShards]) -> list[torch.Tensor]:
    """Copy the file into the bytes `file`: those of the header and of each piece."""
    device = _accelerator(shards)
    with torch.no_grad():
        file[: len(body.header)] = torch.frombuffer(bytearray(body.header), dtype=torch.uint8)
        for piece, offset in body.pieces:
            source = shards[piece.key].view(piece.box)
            target = file[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
            target.copy_(source.resolve_conj().resolve_neg(), non_blocking=device is not None)
    if device is not None:
        device_of(device).synchronize(device)
    bounds = [0, *(offset for _, offset in body.pieces), body.nbytes]
    return [file[start:end] for start, end in pairwise(bounds)]


def _accelerator(shards: Mapping[str, LocalShards]) -> torch.device | None:
    """The device of the tensors, None where all of them are in the memory of the process."""
    return next((part.local.device for part in shards.values() if not on_host(part.local.device)), None)


def tensor_bytes(body: FileLayout, shards: Mapping[str, LocalShards]) -> Iterator[torch.Tensor]:
    """The same bytes, piece by piece and without the buffer, for synchronous saves. Contiguous pieces are not copied."""
    yield torch.frombuffer(bytearray(body.header), dtype=torch.uint8)
    for piece, _ in body.pieces:
        source = shards[piece.key].view(piece.box)
        yield source.resolve_conj().resolve_neg().to(HOST).contiguous().view(-1).view(torch.uint8)
