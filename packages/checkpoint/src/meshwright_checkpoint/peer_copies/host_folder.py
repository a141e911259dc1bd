"""The folder of a run in the memory of a host (/dev/shm), which outlives its processes."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.io.host_memory import available_memory
from meshwright_checkpoint.peer_copies.held_file import PARTIAL, Generation, parse_name
from meshwright_checkpoint.storage.filesystem import FileLock, held_by_other

MEMORY = Path("/dev/shm")
LEFT_SECONDS = 600.0
"""A folder of another run, without processes, is removed when nobody has written to it for so long."""
_LOCK = "lock-"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def memory_id(memory: Path) -> str:
    """What is alike on ranks that share this memory, and on no others: such ranks are on one host.

    Several nodes of torchrun may be on one machine, and containers share its memory or have their own.
    """
    try:
        status = memory.stat()
        return f"{_BOOT.read_text().strip()} {status.st_dev} {status.st_ino}"
    except OSError:
        return socket.gethostname()


class HostFolder:
    """The files of a run on this host. All ranks of the host use it.

    Attributes:
        path: of the folder.
    """

    def __init__(self, run: str, memory: Path) -> None:
        """Raises CheckpointError: there is no memory file system, or another user has made the folder."""
        parent = memory / f"meshwright-{os.geteuid()}"
        self.path = parent / run
        if not memory.is_dir():
            raise CheckpointError(f"{memory} does not exist; copies in memory need a tmpfs there (Linux)")
        try:
            for folder in (parent, self.path):
                with suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                status = folder.lstat()
                if (
                    not stat.S_ISDIR(status.st_mode)
                    or status.st_uid != os.geteuid()
                    or status.st_mode & 0o077
                ):
                    raise CheckpointError(f"{folder} is not a folder of this user alone; remove it")
            self._lock = FileLock(self.path / f"{_LOCK}{uuid.uuid4().hex}")
            self._lock.take()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made: {error}") from error
        atexit.register(self.close)

    def close(self) -> None:
        """End the use of the folder by this process; the last one removes it, if it is empty."""
        self._lock.release()
        with suppress(OSError):
            self.path.rmdir()

    def clean(self) -> None:
        """Remove what killed processes of this run have left, and folders of other runs that have ended."""
        for path in self.path.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)
        for path in self.path.glob(f"{_LOCK}*"):
            lock = FileLock(path)
            if path != self._lock.path and lock.take():
                lock.release()
        for other in self.path.parent.iterdir():
            # not the folder of this run: whoever opens and closes a lock file of its own process has lost the lock (POSIX)
            if other == self.path:
                continue
            with suppress(OSError):
                is_used = any(held_by_other(lock) for lock in other.glob(f"{_LOCK}*"))
                if not is_used and time.time() - other.stat().st_mtime > LEFT_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)

    def files(self) -> dict[str, tuple[Generation, int]]:
        """Name -> generation and rank, of complete files."""
        names = sorted(path.name for path in self.path.iterdir())
        return {name: parsed for name in names if (parsed := parse_name(name)) is not None}

    def keep(self, *generations: Generation) -> None:
        """Remove the files of all other generations."""
        for name, (generation, _) in self.files().items():
            if generation not in generations:
                # another rank of the host does the same
                (self.path / name).unlink(missing_ok=True)

    def spare(
        self, newest: Generation | None, files: Mapping[int, Sequence[tuple[int, str]]], writer: int
    ) -> dict[tuple[int, str], Path]:
        """By rank and whose, the older files whose memory `writer` uses for new ones; those that nobody uses are removed.

        files: of each rank of this host, the files that it writes.
        """
        used = {file for of_rank in files.values() for file in of_rank}
        spare: dict[tuple[int, str], Path] = {}
        for name, (generation, rank) in self.files().items():
            file = (rank, name.rpartition(".")[2])
            if generation == newest or (file in used and file not in files[writer]):
                continue
            if file in used and file not in spare:
                spare[file] = self.path / name
            else:
                # another rank of the host does the same
                (self.path / name).unlink(missing_ok=True)
        return spare

    def room(self) -> int:
        """Bytes that files of this run may take: what is free, and what they take now."""
        used = 0
        for path in self.path.iterdir():
            with suppress(FileNotFoundError):
                used += path.stat().st_size
        free, memory = shutil.disk_usage(self.path).free, available_memory()
        return (free if memory is None else min(free, memory)) + used
