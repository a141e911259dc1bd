"""Storage backends: where a checkpoint is kept, and how it is committed as a whole.

Backends are plugins, found through the hook `meshwright_checkpoint_backends`. The target is a function of a path.
It returns a :class:`CheckpointStorage`, or a :class:`ForeignStorage` for a format other than meshwright's.
The built-in backend "safetensors" takes a path in the file system or a URL of fsspec ("memory://", "s3://").
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.read.wanted import ReadFile, Store
from meshwright_checkpoint.storage.filesystem import DirectoryStorage
from meshwright_dtensor.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from meshwright_checkpoint.rank_messages import Ranks


class WriteFile(Protocol):
    """A file that is written sequentially and is durable once closed."""

    def write(self, data: memoryview | bytes) -> None:
        """Append."""

    def close(self, durable: bool = True) -> None:
        """Close. With `durable` wait until the file is stored; otherwise discard it."""


W = TypeVar("W", bound=WriteFile)
StrPath = str | os.PathLike[str]


@contextmanager
def complete_file(writer: W) -> Iterator[W]:
    """Close the file durably at the end, or discard it after an error."""
    try:
        yield writer
    except BaseException:
        writer.close(durable=False)
        raise
    writer.close()


class CheckpointStorage(Protocol):
    """Storage of one checkpoint, which may not exist yet.

    A save calls in this order: `begin` (rank 0), `claim` (all ranks). Then in the background: `writer` and `write_note` (all
    ranks), `read_note` and `commit` (rank 0), `outcome` (other ranks, until it is not None), `end` (all ranks), `finish` (rank 0).
    Before `commit` returns no reader may see the checkpoint, and afterwards all must.
    """

    where: str
    name: str

    def begin(self, save_id: str) -> None:
        """Lock out other jobs and remove leftovers. Raises CheckpointError if there is a checkpoint or another save."""

    def claim(self, save_id: str, rank: int) -> None:
        """Show that this rank is alive."""

    def writer(self, name: str) -> WriteFile:
        """A new file of the checkpoint."""

    def write_note(self, rank: int, data: bytes) -> None:
        """Publish a note of this rank, for rank 0."""

    def read_note(self, rank: int) -> bytes | None:
        """The note of a rank, None if there is none yet. Raises CheckpointError if the rank died before."""

    def commit(self, manifest: bytes) -> None:
        """Make the checkpoint appear."""

    def outcome(self, save_id: str) -> bool | None:
        """True: the save is committed. False: it failed. None: it is still running."""

    def end(self) -> None:
        """Every rank, at the end of a save, successful or not."""

    def finish(self) -> None:
        """Rank 0: remove leftovers of a failed save and release the lock."""

    def manifest(self) -> Manifest:
        """Read and check the manifest. Raises CorruptError if it is damaged, CheckpointError if it is missing or cannot be read."""

    def open(self, name: str) -> ReadFile:
        """Open a file of the checkpoint. Raises CorruptError if it is missing, CheckpointError if it cannot be read."""

    def nbytes(self, name: str) -> int | None:
        """Size of a file, None if it is missing. Raises CheckpointError if that cannot be told."""

    def children(self) -> Sequence[CheckpointStorage]:
        """The checkpoints directly inside this path: storages that have a manifest, also those that cannot be read."""

    def parent(self) -> CheckpointStorage:
        """The storage that contains this one."""

    def remove(self, save_id: str) -> None:
        """Delete a whole checkpoint. Readers never see a part of it."""

    def clean(self) -> None:
        """Remove leftovers of killed saves in the parent."""


class ForeignStorage(ABC):
    """Storage in a format other than meshwright's. The backend reads and writes it itself; saves are synchronous.

    Attributes:
        where: the path, for messages.
        name: the last component of the path.
    """

    where: str
    name: str

    @abstractmethod
    def open_checkpoint(self, model: nn.Module) -> Store:
        """Open the checkpoint, with the names of `model`. Raises CheckpointError if there is none."""

    @abstractmethod
    def write(self, model: nn.Module, optimizer: Optimizer | None, extra: Any, ranks: Ranks) -> None:
        """Save (a collective call). The checkpoint appears as a whole or not at all."""


def storage_of_path(path: StrPath) -> CheckpointStorage:
    """Storage of the backend "safetensors": a directory, or a URL of fsspec."""
    text = os.fspath(path)
    if "://" not in text:
        return DirectoryStorage(path)
    from meshwright_checkpoint.storage.object_store import ObjectStorage

    return ObjectStorage(text)


def storage_of(path: StrPath, backend: str = DEFAULT) -> CheckpointStorage:
    """The storage of `path`, for backends with meshwright's format.

    Raises:
        PluginError: no plugin registers that name.
        UsageError: the backend has a format other than meshwright's.
    """
    storage = any_storage_of(path, backend)
    if isinstance(storage, ForeignStorage):
        raise UsageError(
            f"backend {backend!r} has another format, which only load() and save() can use: call load(path, backend={backend!r}), "
            "then save() without it"
        )
    return storage


def any_storage_of(path: StrPath, backend: str = DEFAULT) -> CheckpointStorage | ForeignStorage:
    """The storage of `path` in any backend. Raises PluginError for a name that no plugin registers."""
    if backend == DEFAULT:
        return storage_of_path(path)
    from meshwright_dtensor.plugins import BackendSpec, discover

    storage: CheckpointStorage | ForeignStorage = discover().get(BackendSpec, backend).load()(path)
    return storage


def local_path(storage: CheckpointStorage) -> Path | None:
    """The directory of a storage, None if it has none."""
    return storage.path if isinstance(storage, DirectoryStorage) else None
