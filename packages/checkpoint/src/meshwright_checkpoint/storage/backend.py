"""Storage backends: where a checkpoint is kept, and how it is committed as a whole.

Backends are plugins, found through the hook `meshwright_checkpoint_backends`. The target is a function of a path.
It returns a :class:`CheckpointStorage`, or a :class:`ForeignStorage` for a format other than meshwright's.
The built-in backend "safetensors" takes a path in the file system or a URL of fsspec ("memory://", "s3://").
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.read.wanted import ReadFile, Store
from meshwright_checkpoint.storage.filesystem import DirectoryStorage
from meshwright_dtensor.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshwright_checkpoint.rank_messages import Ranks


class WriteFile(Protocol):
    """A file that is written in order and is durable once closed."""

    def write(self, data: memoryview | bytes) -> None:
        """Append."""

    def close(self, durable: bool = True) -> None:
        """Close; `durable`: once it is stored. False gives it up."""


class CheckpointStorage(Protocol):
    """Where one checkpoint lies, or will.

    A save calls, in this order: `begin` (rank 0), `claim` (every rank, after it), and in the background `writer`, `mark` (every
    rank), `marked` and `commit` (rank 0), `outcome` (the others, until it is not None), `end` (every rank), `finish` (rank 0).
    Until `commit` returns nobody may see a checkpoint, and afterwards everybody.
    """

    where: str
    name: str

    def begin(self, save_id: str) -> None:
        """Keep other jobs away, remove leftovers. Raises CheckpointError where the place is taken."""

    def claim(self, save_id: str, rank: int) -> None:
        """Show that this rank is alive."""

    def writer(self, name: str) -> WriteFile:
        """A new file of the checkpoint."""

    def write_note(self, rank: int, data: bytes) -> None:
        """Leave a note of this rank for rank 0."""

    def read_note(self, rank: int) -> bytes | None:
        """The note of a rank, if it has left one. Raises CheckpointError where it has died without."""

    def commit(self, manifest: bytes) -> None:
        """Make the checkpoint appear."""

    def outcome(self, save_id: str) -> bool | None:
        """True once the save is committed, False once it has failed, None as long as it goes on."""

    def end(self) -> None:
        """Every rank, at the end of a save, successful or not."""

    def finish(self) -> None:
        """Rank 0: remove what is left of a save that failed, and let others in."""

    def manifest(self) -> Manifest:
        """Read and check the manifest. Raises CheckpointError where there is none."""

    def open(self, name: str) -> ReadFile:
        """A file of the checkpoint. Raises CorruptError where it is missing."""

    def nbytes(self, name: str) -> int | None:
        """Size of a file, None where it is missing."""

    def children(self) -> Sequence[CheckpointStorage]:
        """The places in this one that have a manifest."""

    def parent(self) -> CheckpointStorage:
        """Where its siblings are."""

    def remove(self, save_id: str) -> None:
        """Delete a whole checkpoint, so that nobody ever sees a part of it."""

    def clean(self) -> None:
        """Remove what killed saves have left among the siblings."""


class ForeignStorage(ABC):
    """A backend in the format of others, which opens and writes it itself. Saves are synchronous.

    Attributes:
        where: its path, for messages.
        name: the last part of it.
    """

    where: str
    name: str

    @abstractmethod
    def open_checkpoint(self, model: nn.Module) -> Store:
        """The checkpoint, open, with the names of `model`. Raises CheckpointError where there is none."""

    @abstractmethod
    def write(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any, ranks: Ranks
    ) -> None:
        """Save (a collective call); it appears whole or not at all."""


def storage_of_path(path: str | os.PathLike[str]) -> CheckpointStorage:
    """The backend "safetensors": a directory, or a URL of fsspec."""
    text = os.fspath(path)
    if "://" not in text:
        return DirectoryStorage(path)
    from meshwright_checkpoint.storage.object_store import ObjectStorage

    return ObjectStorage(text)


def storage_of(path: str | os.PathLike[str], backend: str = DEFAULT) -> CheckpointStorage:
    """The place of `path` in a backend that has this package's format; else as `any_storage_of`.

    Raises:
        PluginError: no plugin registers that name.
        UsageError: the backend has a format of its own.
    """
    storage = any_storage_of(path, backend)
    if isinstance(storage, ForeignStorage):
        raise UsageError(
            f"backend {backend!r} has another format, for load() and save() only: load(path, backend={backend!r}), then save() "
            "without it"
        )
    return storage


def any_storage_of(
    path: str | os.PathLike[str], backend: str = DEFAULT
) -> CheckpointStorage | ForeignStorage:
    """The place of `path` in the backend of that name. Raises PluginError for a name that no plugin registers."""
    if backend == DEFAULT:
        return storage_of_path(path)
    from meshwright_dtensor.plugins import BackendSpec, discover

    storage: CheckpointStorage | ForeignStorage = discover().get(BackendSpec, backend).load()(path)
    return storage


def local_path(storage: CheckpointStorage) -> Path | None:
    """Its directory, where it has one."""
    return storage.path if isinstance(storage, DirectoryStorage) else None
