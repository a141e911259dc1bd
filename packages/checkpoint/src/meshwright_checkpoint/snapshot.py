"""The bytes of this rank's file: a host snapshot, copied out of the model at one moment, or the model's own memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch

from meshwright_checkpoint.datafile import Body
from meshwright_checkpoint.holding import Held, part_of
from meshwright_checkpoint.streaming import aligned_memory
from meshwright_dtensor.boxes import box_shape, intersect, slice_of


class Snapshots:
    """One buffer, reused from save to save; pinned where tensors are copied from a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, body: Body, held: Mapping[str, Held]) -> list[torch.Tensor]:
        """The file as `body` lays it out, as the bytes of header and pieces; valid until the next call."""
        cuda = any(held[piece.key].local.is_cuda for piece, _ in body.pieces)
        if self._buffer.numel() < body.nbytes or (cuda and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffer = (
                torch.empty(body.nbytes, dtype=torch.uint8, pin_memory=True)
                if cuda
                else aligned_memory(body.nbytes)  # written from where it is
            )
        file = self._buffer[: body.nbytes]
        with torch.no_grad():
            file[: len(body.header)] = torch.frombuffer(bytearray(body.header), dtype=torch.uint8)
            for piece, offset in body.pieces:
                _copy(file, piece.box, offset, held[piece.key])
        if cuda:
            torch.cuda.synchronize()
        bounds = [0, *(offset for _, offset in body.pieces), body.nbytes]
        return [file[start:end] for start, end in pairwise(bounds)]


def straight(body: Body, held: Mapping[str, Held]) -> Iterator[torch.Tensor]:
    """The same bytes piece by piece without a snapshot, for a save that is waited for.

    What lies in one run of memory is not copied at all.
    """
    yield torch.frombuffer(bytearray(body.header), dtype=torch.uint8)
    for piece, _ in body.pieces:
        source = _source(piece.box, held[piece.key])
        yield source.resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)


def _source(box: tuple[tuple[int, int], ...], held: Held) -> torch.Tensor:
    there, here = next(pair for pair in held.boxes if intersect(box, pair[0]) == box)
    return slice_of(held.local, part_of(box, there, here))


def _copy(file: torch.Tensor, box: tuple[tuple[int, int], ...], offset: int, held: Held) -> None:
    source = _source(box, held)
    nbytes = source.numel() * source.element_size()
    target = file[offset : offset + nbytes].view(source.dtype).view(box_shape(box))
    target.copy_(source.resolve_conj().resolve_neg(), non_blocking=source.is_cuda)
