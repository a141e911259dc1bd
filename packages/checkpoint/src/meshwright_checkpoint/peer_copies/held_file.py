"""One file of a copy in memory: what one rank wrote of one step, with a note that describes it.

The file is a safetensors file as in a checkpoint, then the note (JSON; see `describe_file`), then a tail: SHA-256 of the note, and
the lengths of both. Its name has the start of the run, the step, the id of the save, the rank, and whose copy it is.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.checksum import block_sums

OWN, PEERS = "own", "peer"
"""Of a rank of this host, and of one of another host."""
PARTIAL = ".partial"
_TAIL = struct.Struct("<32sQQ")
_NAME = re.compile(r"(\d{8})-(\d{12})-([0-9a-f]{32})-(\d{1,7})-of-(\d{1,7})\.(own|peer)")


@dataclass(frozen=True, order=True)
class Generation:
    """The copies of one step: later ones are larger.

    start: of the run. id: of the save. ranks: how many files there are.
    """

    start: int
    step: int
    id: str
    ranks: int

    def file_name(self, rank: int, whose: str) -> str:
        """Of the file that a rank wrote."""
        return f"{self.start:08d}-{self.step:012d}-{self.id}-{rank}-of-{self.ranks}.{whose}"


def parse_name(name: str) -> tuple[Generation, int] | None:
    """Generation and rank of a file; None for other files, and for those that are not complete."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    start, step, rank, ranks = (int(match[group]) for group in (1, 2, 4, 5))
    return Generation(start, step, match[3], ranks), rank


def total_nbytes(body: int, note: bytes) -> int:
    """Bytes of a file with a body of so many bytes."""
    return body + len(note) + _TAIL.size


class NewFile:
    """A file that is being written, under another name until `publish`.

    Attributes:
        memory: its bytes.
    """

    def __init__(self, path: Path, nbytes: int, spare: Path | None = None) -> None:
        """`spare`: a file that is not needed any more, whose memory is used. Raises CheckpointError: there is no room for it."""
        self._path, self._partial = path, path.with_name(path.name + PARTIAL)
        if spare is not None:
            os.rename(spare, self._partial)
        fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            # all pages now: without them a write to the mapping would end the process with SIGBUS
            os.posix_fallocate(fd, 0, nbytes)
            # with all pages in the page table: a fault for each costs more than the copy
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.memory = torch.frombuffer(mmap.mmap(fd, nbytes, flags), dtype=torch.uint8)
        except OSError as error:
            with suppress(OSError):
                self._partial.unlink()
            text = f"{path.parent} has no room for {nbytes / 2**20:.0f} MiB of a copy ({error.strerror})"
            raise CheckpointError(f"{text}; make it larger, or leave out peer_copies") from error
        finally:
            os.close(fd)

    def finish(self, body: int, note: bytes) -> None:
        """Write note and tail after the body."""
        tail = _TAIL.pack(hashlib.sha256(note).digest(), body, len(note))
        self.memory[body:] = torch.frombuffer(bytearray(note + tail), dtype=torch.uint8)

    def publish(self) -> None:
        """Give the complete file its name."""
        os.rename(self._partial, self._path)


class HeldFile:
    """A complete file, open for reading, whose checksums are right.

    Attributes:
        note: see `describe_file`, with further fields.
        memory: its bytes; private to this process.
    """

    def __init__(self, path: Path, check: bool = True) -> None:
        """`check`: the checksums of the values too. Raises ValueError or OSError: it is damaged, or cannot be read."""
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes < _TAIL.size:
                raise ValueError(f"it has {nbytes} bytes")
            # tensors cannot be read-only: writes would go to pages of this process
            mapped = mmap.mmap(
                file.fileno(), nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        digest, body, length = _TAIL.unpack(self._bytes(nbytes - _TAIL.size, nbytes))
        if body + length + _TAIL.size != nbytes:
            raise ValueError(f"it has {nbytes} bytes, not {body} + {length} + {_TAIL.size}")
        note = bytes(self._bytes(body, body + length))
        if hashlib.sha256(note).digest() != digest:
            raise ValueError("the checksum of its note does not match")
        self.note: dict[str, Any] = json.loads(note)
        if not check:
            return
        file_note = self.note["file"]
        starts = [0, *(offset for _, _, offset, _ in self.note["pieces"]), body]
        sums = [file_note["header_sums"], *(digits for *_, digits in self.note["pieces"])]
        for (start, end), digits in zip(pairwise(starts), sums, strict=True):
            if block_sums(self._bytes(start, end)) != digits:
                raise ValueError(f"the checksum of its bytes {start} to {end} does not match")

    def _bytes(self, start: int, end: int) -> memoryview:
        return bytes_of_tensor(self.memory[start:end])
