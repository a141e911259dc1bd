"""Checkpoints in a file system: a directory that is committed by one rename.

All files are written to the staging directory ``.<name>.partial-<id>`` next to the final one, and made durable. The
manifest is written last. Then the staging directory is renamed.

Rank 0 holds a lock file next to the directory during the save, which locks out other jobs. Each rank holds a lock file in
the staging directory, which shows that it is alive. The system releases locks when a process ends. So the background
save needs no collectives, and a killed save leaves at most a staging directory, which the next save removes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import HEAD_NBYTES, MAX_BYTES, NAME, Manifest, has_form
from meshwright_checkpoint.io.direct_write import Writer
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.storage.failures import reading
from meshwright_checkpoint.storage.file_reader import Reader
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.utils.names import did_you_mean

DATA = "data-*.safetensors"
"""Files of a checkpoint with values."""
# pattern of a file name -> what a directory with such a file is
_FOREIGN = MappingProxyType(
    {
        ".metadata": 'it is in the format of torch.distributed.checkpoint: mw.load(..., backend="dcp") reads it',
        "model.safetensors*": "it is a from_pretrained directory: mw.load reads it for a model, without an optimizer",
        "pytorch_model*.bin": "its weights are pickles, which are never read: write them again with save_pretrained",
        DATA: "it has files of a checkpoint without their manifest, so they cannot be read",
    }
)
PARTIAL, DELETED, LOCK = ".partial-", ".deleted-", ".lock"


class FileLock:
    """A lock that ends with its process. Forked children do not inherit it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def take(self) -> bool:
        """Take the lock; False if another process has it."""
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
            # the previous holder has removed the file in the meantime
            os.close(fd)

    def write(self, text: str) -> None:
        """Write the holder's description."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def release(self) -> None:
        """Release the lock and remove the file."""
        if self._fd is not None:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = None


def held_by_other(path: Path) -> bool:
    """Whether another live process holds the lock file; False if there is no file."""
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
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@waiting_for_storage()
def publish_directory(staging: Path, path: Path) -> None:
    """Make a staging directory durable and rename it to `path`."""
    sync_directory(staging)
    os.rename(staging, path)
    sync_directory(path.parent)


@contextmanager
def staged_directory(path: Path, token: str, ranks: Ranks) -> Iterator[Path]:
    """Yield a new staging directory next to `path`, and rename it to `path` at the end (a collective call).

    Rank 0 creates the directory, and removes it after an error. Raises CheckpointError if `path` exists.
    """
    staging = path.parent / f".{path.name}{PARTIAL}{token}"

    def begin() -> None:
        if path.exists():
            raise CheckpointError(f"{path} exists already; save under another name, or remove it first")
        staging.mkdir(parents=True)

    ranks.run_on_first(begin)
    try:
        yield staging
        ranks.run_on_first(lambda: publish_directory(staging, path))
    except BaseException:
        if ranks.rank == 0:
            with suppress(OSError):
                DirectoryStorage(staging).remove("failed")
        raise


def _told(look: Callable[[], bool], otherwise: bool) -> bool:
    """What `look` returns; `otherwise` where it cannot tell."""
    try:
        return look()
    except CheckpointError:
        return otherwise


class DirectoryStorage:
    """CheckpointStorage of one checkpoint in the directory `path`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self.where = str(self.path)
        self.name = self.path.name
        self._lock = FileLock(self.path.parent / f".{self.name}{LOCK}")
        self._alive: FileLock | None = None
        self._staging: Path | None = None

    # --- saving -------------------------------------------------------------------------------------------------------

    def begin(self, save_id: str) -> None:
        """Rank 0: take the lock, remove leftovers of killed saves, create the staging directory. Raises CheckpointError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = self._lock.take()
        except OSError as error:
            file = next((parent for parent in self.path.parents if parent.is_file()), None)
            why = error.strerror if file is None else f"{file} is a file"
            text = f"{self.where} cannot be created: {why}; save to a path where a directory can be created"
            raise CheckpointError(text) from error
        if not free:
            text = f"another job is saving to {self.where} ({self._holder()}); save elsewhere, or wait for it"
            raise CheckpointError(text)
        try:
            if self.path.exists():
                text = f"{self.where} exists already; save under another name, or remove it first"
                raise CheckpointError(text)
            self._lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "id": save_id}))
            for left in self.path.parent.glob(f".{self.name}{PARTIAL}*"):
                shutil.rmtree(left, ignore_errors=True)
            self._staging_path(save_id).mkdir()
        except BaseException:
            self._lock.release()
            raise

    def claim(self, save_id: str, rank: int) -> None:
        """Every rank, after `begin` on rank 0: show that this rank is alive."""
        self._staging = self._staging_path(save_id)
        if not self._staging.is_dir():
            text = f"{self._staging} is not there on rank {rank}: all ranks must see one file system; save to a shared directory"
            raise CheckpointError(text)
        self._alive = FileLock(self._staging / f"alive-{rank}")
        self._alive.take()

    def writer(self, name: str) -> Writer:
        assert self._staging is not None
        return Writer(self._staging / name)

    def write_note(self, rank: int, data: bytes) -> None:
        assert self._staging is not None
        path = self._staging / f"done-{rank}"
        path.with_suffix(".new").write_bytes(data)
        os.rename(path.with_suffix(".new"), path)

    def read_note(self, rank: int) -> bytes | None:
        assert self._staging is not None
        path = self._staging / f"done-{rank}"
        if not path.exists():
            if held_by_other(self._staging / f"alive-{rank}") or path.exists():
                return None
            raise CheckpointError(f"rank {rank} died, or could not write, while saving {self.where}")
        return path.read_bytes()

    def commit(self, manifest: bytes) -> None:
        """Rank 0, after all ranks: write the manifest, then rename the directory."""
        assert self._staging is not None
        for note in [*self._staging.glob("done-*"), *self._staging.glob("alive-*")]:
            note.unlink()
        writer = Writer(self._staging / NAME)
        writer.write(manifest)
        writer.close()
        publish_directory(self._staging, self.path)

    def end(self) -> None:
        if self._alive is not None:
            self._alive.release()
            self._alive = None

    def finish(self) -> None:
        """Rank 0, after `end`: remove leftovers of a failed save and release the lock."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        self._lock.release()

    def outcome(self, save_id: str) -> bool | None:
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
        """Read and check the manifest.

        Raises CorruptError: it is damaged. CheckpointError: there is none, or it cannot be read.
        """
        path = self.path / NAME
        with reading(str(path)):
            self._check_place()
            with closing(Reader(path)) as reader:
                data = bytearray(min(reader.nbytes, MAX_BYTES + 1))
                reader.read_into(memoryview(data), 0)
        return Manifest.from_bytes(bytes(data), str(path))

    def _check_place(self) -> None:
        """Raise CheckpointError, with a hint, where there is no manifest."""
        try:
            there = self.path.exists()
        except OSError as error:
            # a path that no file can have is no damage of a checkpoint
            raise CheckpointError(f"{self.where} cannot be read: {error.strerror}") from error
        if not there:
            near = did_you_mean(self.name, [storage.name for storage in self.parent().children()])
            hint = f"; did you mean {near!r}?" if near else "; give the path of a checkpoint"
            raise CheckpointError(f"{self.where} does not exist{hint}")
        if not self.path.is_dir():
            hint = "pickles, as torch.save writes them, are never read"
            if (self.path.parent / NAME).exists():
                hint = f"give {self.path.parent}"
            raise CheckpointError(f"{self.where} is a file, and a checkpoint is a directory; {hint}")
        if not (self.path / NAME).exists():
            raise CheckpointError(f"{self.where} is not a checkpoint: it has no {NAME}{self._content_hint()}")

    def open(self, name: str) -> Reader:
        return Reader(self.path / name)

    def nbytes(self, name: str) -> int | None:
        path = self.path / name
        try:
            with reading(str(path)):
                return path.stat().st_size
        except CorruptError:
            return None

    def children(self) -> list[DirectoryStorage]:
        """The checkpoints directly inside this directory, and what cannot be read and so may be one."""
        # of what cannot be read, to load it says why
        return [each for each in self._visible() if _told(each.is_checkpoint, otherwise=True)]

    def without_manifest(self) -> list[DirectoryStorage]:
        """Directories directly inside this one with files of a checkpoint that has lost its manifest."""
        return [each for each in self._visible() if _told(each._has_data_alone, otherwise=False)]

    def is_checkpoint(self) -> bool:
        """Whether there is a manifest, of the form of ours or next to files of ours. Raises CheckpointError: it cannot be read."""
        form = self._form()
        return form is not None and (form or self._has_data())

    def _has_data_alone(self) -> bool:
        return self._form() is None and self._has_data()

    def _form(self) -> bool | None:
        """Whether the manifest has the form of ours; None without one. Raises CheckpointError: it cannot be read."""
        try:
            with closing(Reader(self.path / NAME)) as reader:
                head = bytearray(min(reader.nbytes, HEAD_NBYTES))
                reader.read_into(memoryview(head), 0)
            return has_form(bytes(head))
        except CorruptError:
            # false of what is there and is no file
            return False if os.path.lexists(self.path / NAME) else None

    def _has_data(self) -> bool:
        """Raises CheckpointError: it cannot be listed."""
        try:
            with reading(self.where):
                return any(fnmatchcase(name, DATA) for name in os.listdir(self.path))
        except CorruptError:
            return False

    def _visible(self) -> list[DirectoryStorage]:
        """What is directly inside. Raises CheckpointError: it cannot be listed, which is not the same as empty."""
        try:
            names = sorted(path.name for path in self.path.iterdir())
            # what fsck has found at the root of a disk is closed to others
            return [
                DirectoryStorage(self.path / n) for n in names if not n.startswith(".") and n != "lost+found"
            ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.where} cannot be listed: {error.strerror}") from error

    def parent(self) -> DirectoryStorage:
        """The directory that contains this one."""
        return DirectoryStorage(self.path.parent)

    def remove(self, save_id: str) -> None:
        """Delete a whole checkpoint. It is renamed first, so that readers never see a part of it."""
        hidden = self.path.parent / f".{self.name}{DELETED}{save_id}"
        with suppress(FileNotFoundError):
            os.rename(self.path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def clean(self) -> None:
        """Remove leftovers of killed saves in the parent; running saves are not touched."""
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
        """What the directory holds instead of a checkpoint."""
        names = [storage.name for storage in self.children()]
        if names:
            return f"; it holds {', '.join(names[-3:])}: give one of them, or latest({self.where!r})"
        for pattern, hint in _FOREIGN.items():
            if next(self.path.glob(pattern), None) is not None:
                return f"; {hint}"
        return ""
