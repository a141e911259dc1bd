"""One copy of one rank: its checksums and note, and the files of other ranks that it receives, in a thread."""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.checksum import BLOCK, DIGITS, block_sums
from meshwright_checkpoint.format.safetensors_file import FileLayout
from meshwright_checkpoint.peer_copies.exchange import exchange
from meshwright_checkpoint.peer_copies.held_file import NewFile, total_nbytes
from meshwright_checkpoint.saving.background import describe_file

EXIT_SECONDS = 10.0
"""How long a process that ends waits for a file that is being sent."""


class RankCopy:
    """A copy of this rank.

    Attributes:
        nbytes: of this rank's file.
    """

    def __init__(self, rank: int, body: FileLayout, fields: dict[str, Any]) -> None:
        """`fields`: of the note, further ones than those of `describe_file`; with `optimizer` and `streams`."""
        self._rank, self._body, self._fields = rank, body, fields
        bounds = [0, *(offset for _, offset in body.pieces), body.nbytes]
        # checksums have a fixed length, so the length of the note is known before them
        blank = ["0" * (-(-(end - start) // BLOCK) * DIGITS) for start, end in pairwise(bounds)]
        self.nbytes = total_nbytes(body.nbytes, self._note(blank))
        self._files: dict[int, NewFile] = {}
        self._parts: list[torch.Tensor] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def _note(self, sums: list[str]) -> bytes:
        return json.dumps({**describe_file(self._rank, self._body, sums), **self._fields}).encode()

    def take(self, files: dict[int, NewFile], copy: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """Copy the values now. `files`: by rank, the file of this rank and those to receive; `copy`: see `copy_file`."""
        self._files = files
        self._parts = copy(files[self._rank].memory[: self._body.nbytes])

    def begin(self, holder: int | None, group: dist.ProcessGroup | None, tag: int) -> None:
        """Complete the files in a thread: send this rank's to `holder`, receive the others. `group`, `tag`: see `exchange`."""
        # a daemon: it waits for other ranks, which may be gone
        self._thread = threading.Thread(
            target=self._run, args=(holder, group, tag), name="meshwright-copy", daemon=True
        )
        atexit.register(self._join, EXIT_SECONDS)
        self._thread.start()

    def end(self) -> None:
        """Wait for the thread. Raises CheckpointError: the copy is not complete."""
        self._join(None)
        atexit.unregister(self._join)
        if self._error is not None:
            raise CheckpointError(f"the copy in memory failed: {self._error}") from self._error

    def _join(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, holder: int | None, group: dist.ProcessGroup | None, tag: int) -> None:
        try:
            files, parts = self._files, self._parts
            self._files, self._parts = {}, []
            file_of_rank = files.pop(self._rank)
            file_of_rank.finish(
                self._body.nbytes, self._note([block_sums(bytes_of_tensor(part)) for part in parts])
            )
            file_of_rank.publish()
            exchange(
                file_of_rank.memory, holder, {rank: file.memory for rank, file in files.items()}, group, tag
            )
            for file in files.values():
                file.publish()
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            self._error = error
