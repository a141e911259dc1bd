"""Checkpoints in a file system: a directory that appears whole, by one rename, or not at all.

Everything is written into ``.<name>.partial-<id>`` beside the final directory and made durable; the manifest comes last; then
the directory is renamed.  A lock file beside it, held by rank 0 while it saves, keeps other jobs away, and one inside it per
rank tells whether that rank is alive: the system lets go of them when a process ends, however it ends.  So ranks need no
collective call in the background, and whatever is killed when leaves at most a partial directory, which nobody reads and the
next save removes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import MAX_BYTES, NAME, Manifest
from meshwright_checkpoint.io.direct_read import ALIGN, DirectReader
from meshwright_checkpoint.io.direct_write import Writer
from meshwright_dtensor.utils.names import did_you_mean

_FOREIGN = (
    (
        ".metadata",
        'it is in the format of torch.distributed.checkpoint: mw.load(..., backend="dcp") reads it',
    ),
    ("model.safetensors*", "it is a directory of from_pretrained, which mw.load takes for a model alone"),
    (
        "pytorch_model*.bin",
        "its weights are pickles, which are never read: write it anew with save_pretrained",
    ),
    (
        "data-*.safetensors",
        "it has files of a checkpoint, and their manifest is gone: what they held cannot be known",
    ),
)
PARTIAL, DELETED, LOCK = ".partial-", ".deleted-", ".lock"


class FileLock:
    """A lock that ends with the process that holds it; children made by fork do not inherit it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def take(self) -> bool:
        """Take the lock; False where another process has it."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                os.close(fd)
                return False
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    self._fd = fd
                    return True
            os.close(fd)  # its last holder has removed the file meanwhile

    def write(self, text: str) -> None:
        """Say who holds it."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def release(self) -> None:
        """Let go, and remove the file."""
        if self._fd is not None:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = None


def held_by_other(path: Path) -> bool:
    """Whether another process that lives holds the lock file; False where there is none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(fd)
    return False


def sync_directory(path: Path) -> None:
    """Make what was created, renamed and removed in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Reader:
    """A file that parts are read of, from several threads. Through the system's cache one at a time: it reads ahead of one that
    reads on, and two that take turns at it stop that. Around it (`read_pages`) all at once.
    """

    def __init__(self, path: Path, follow: bool = False) -> None:
        """`follow`: allow a symbolic link (download caches have them), and read through the page cache."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
            self._fd = os.open(path, flags)
        except OSError as error:
            raise CorruptError(f"{path} cannot be read: {error.strerror}") from error
        self._turn = threading.Lock()
        self.where = str(path)
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise CorruptError(f"{path} cannot be read: it is no ordinary file")
        self._direct = None if follow else DirectReader(self._fd)

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """Whether `read_pages` is the faster way to these bytes."""
        return self._direct is not None and self._direct.worthwhile(offset, nbytes)

    def read_pages(self, memory: memoryview, offset: int, nbytes: int) -> None:
        """Read the pages that hold `nbytes` from `offset` on into `memory`, which starts with a page and has room for them."""
        start = offset // ALIGN * ALIGN
        try:
            done = 0 if self._direct is None else self._direct.read(memory, offset, nbytes)
        except OSError as error:
            raise CorruptError(f"{self.where} cannot be read: {error.strerror}") from error
        if start + done < offset + nbytes:
            self.read_into(memory[done : offset - start + nbytes], start + done)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises CorruptError where the file ends before."""
        with self._turn:
            self._read_into(buffer, offset)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CorruptError(f"{self.where} cannot be read: {error.strerror}") from error
            if not count:
                raise CorruptError(
                    f"{self.where} ends at {offset + done} bytes, where more are expected: it is cut short"
                )
            done += count

    def close(self) -> None:
        """Close."""
        os.close(self._fd)


class DirectoryStorage:
    """Where one checkpoint lies, or will: a directory.

    Attributes:
        path: the final directory.
        where: as text, for messages.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self.where = str(self.path)
        self.name = self.path.name
        self._lock = FileLock(self.path.parent / f".{self.name}{LOCK}")
        self._alive: FileLock | None = None
        self._staging: Path | None = None

    # --- saving -------------------------------------------------------------------------------------------------------

    def begin(self, save_id: str) -> None:
        """Rank 0: take the lock, remove leftovers of killed saves, make the directory to write into.

        Raises:
            CheckpointError: another job saves here, or there is a checkpoint (or anything else) already.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = self._lock.take()
        except OSError as error:
            file = next((parent for parent in self.path.parents if parent.is_file()), None)
            why = error.strerror if file is None else f"{file} is a file"
            raise CheckpointError(
                f"{self.where} cannot be made: {why}; save where a directory can be"
            ) from error
        if not free:
            raise CheckpointError(
                f"another job is saving to {self.where} ({self._holder()}); save elsewhere, or wait for it"
            )
        try:
            if self.path.exists():
                raise CheckpointError(
                    f"{self.where} exists already; save under another name, or remove it first"
                )
            self._lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "id": save_id}))
            for left in self.path.parent.glob(f".{self.name}{PARTIAL}*"):
                shutil.rmtree(left, ignore_errors=True)
            self._staging_path(save_id).mkdir()
        except BaseException:
            self._lock.release()
            raise

    def claim(self, save_id: str, rank: int) -> None:
        """Every rank, once rank 0 has begun: show that this rank is alive."""
        self._staging = self._staging_path(save_id)
        if not self._staging.is_dir():
            raise CheckpointError(
                f"{self._staging} is not there on rank {rank}: all ranks must see one file system; save to a shared directory"
            )
        self._alive = FileLock(self._staging / f"alive-{rank}")
        self._alive.take()

    def writer(self, name: str) -> Writer:
        """A new file of the checkpoint."""
        assert self._staging is not None
        return Writer(self._staging / name)

    def write_note(self, rank: int, data: bytes) -> None:
        """Leave a note of this rank for rank 0."""
        assert self._staging is not None
        path = self._staging / f"done-{rank}"
        path.with_suffix(".new").write_bytes(data)
        os.rename(path.with_suffix(".new"), path)

    def read_note(self, rank: int) -> bytes | None:
        """The note of a rank, if it has left one. Raises CheckpointError where it has died without."""
        assert self._staging is not None
        path = self._staging / f"done-{rank}"
        if not path.exists():
            if held_by_other(self._staging / f"alive-{rank}") or path.exists():
                return None
            raise CheckpointError(f"rank {rank} died, or could not write, while saving {self.where}")
        return path.read_bytes()

    def commit(self, manifest: bytes) -> None:
        """Rank 0, once all ranks are done: the manifest, and then the name."""
        assert self._staging is not None
        for pattern in ("done-*", "alive-*"):
            for note in self._staging.glob(pattern):
                note.unlink()
        writer = Writer(self._staging / NAME)
        writer.write(manifest)
        writer.close()
        sync_directory(self._staging)
        os.rename(self._staging, self.path)
        sync_directory(self.path.parent)

    def end(self) -> None:
        """Every rank, at the end of a save, successful or not."""
        if self._alive is not None:
            self._alive.release()
            self._alive = None

    def finish(self) -> None:
        """Rank 0, after `end`: remove what is left of a save that failed, and let others in."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        self._lock.release()

    def outcome(self, save_id: str) -> bool | None:
        """For other ranks: True once the save is committed, False once it has failed, None as long as it goes on."""
        staging = self._staging_path(save_id)
        going = staging.exists() and held_by_other(self._lock.path)
        if (self.path / NAME).exists():
            with suppress(CheckpointError):
                if self.manifest().id == save_id:
                    return True
        return None if going else False

    def _staging_path(self, save_id: str) -> Path:
        return self.path.parent / f".{self.name}{PARTIAL}{save_id}"

    def _holder(self) -> str:
        with suppress(OSError, ValueError, TypeError, KeyError):
            data = json.loads(self._lock.path.read_text())
            return f"process {int(data['pid'])} on {str(data['host'])[:80]}"
        return "unknown process"

    # --- reading ------------------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Read and check the manifest. Raises CheckpointError where there is none, CorruptError where it is damaged."""
        path = self.path / NAME
        if not self.path.exists():
            near = did_you_mean(self.name, [storage.name for storage in self.parent().children()])
            hint = f"; did you mean {near!r}?" if near else "; give the path of a checkpoint"
            raise CheckpointError(f"{self.where} does not exist{hint}")
        if not self.path.is_dir():
            inside = (self.path.parent / NAME).exists()
            hint = (
                f"give {self.path.parent}" if inside else "pickles, as torch.save writes them, are never read"
            )
            raise CheckpointError(f"{self.where} is a file, and a checkpoint is a directory; {hint}")
        if not path.exists():
            raise CheckpointError(f"{self.where} is no checkpoint: it has no {NAME}{self._content_hint()}")
        reader = Reader(path)
        try:
            data = bytearray(min(reader.nbytes, MAX_BYTES + 1))
            reader.read_into(memoryview(data), 0)
        finally:
            reader.close()
        return Manifest.from_bytes(bytes(data), str(path))

    def open(self, name: str) -> Reader:
        """A file of the checkpoint. Raises CorruptError where it is missing."""
        return Reader(self.path / name)

    def nbytes(self, name: str) -> int | None:
        """Size of a file, None where it is missing."""
        with suppress(OSError):
            return (self.path / name).stat().st_size
        return None

    def children(self) -> list[DirectoryStorage]:
        """Directories in this one that have a manifest."""
        try:
            paths = sorted(self.path.iterdir())
        except OSError:
            return []
        return [DirectoryStorage(p) for p in paths if not p.name.startswith(".") and (p / NAME).is_file()]

    def parent(self) -> DirectoryStorage:
        """Where its siblings are."""
        return DirectoryStorage(self.path.parent)

    def remove(self, save_id: str) -> None:
        """Delete a whole checkpoint: out of sight first, so that nobody ever sees a part of it."""
        hidden = self.path.parent / f".{self.name}{DELETED}{save_id}"
        with suppress(FileNotFoundError):
            os.rename(self.path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def clean(self) -> None:
        """Remove what killed saves left among the siblings; saves that go on are left alone."""
        for left in self.path.parent.glob(f".*{DELETED}*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in self.path.parent.glob(f".*{PARTIAL}*"):
            self._remove_if_unlocked(left.name.rpartition(PARTIAL)[0], left)
        for lock in self.path.parent.glob(f".*{LOCK}"):
            self._remove_if_unlocked(lock.name.removesuffix(LOCK), None)

    def _remove_if_unlocked(self, hidden_name: str, left: Path | None) -> None:
        lock = FileLock(self.path.parent / f"{hidden_name}{LOCK}")
        if lock.path != self._lock.path and lock.take():
            if left is not None:
                shutil.rmtree(left, ignore_errors=True)
            lock.release()

    def _content_hint(self) -> str:
        """What lies there instead."""
        names = [storage.name for storage in self.children()]
        if names:
            return f"; it holds {', '.join(names[-3:])}: give one of them, or latest({self.where!r})"
        for pattern, hint in _FOREIGN:
            if next(self.path.glob(pattern), None) is not None:
                return f"; {hint}"
        return ""
