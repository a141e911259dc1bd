"""Places: where a checkpoint lies, and how it comes to be there whole. Backends are found through `meshwright_checkpoint_backends`.

A backend's target is a function of a path that returns a :class:`Place`, or a :class:`ForeignPlace` for a format of others.
The first-party one, "safetensors", takes a path of the
file system, or a URL that fsspec knows ("memory://", "s3://").
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
from meshwright_checkpoint.storage.filesystem import LocalPlace
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


class Place(Protocol):
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

    def mark(self, rank: int, data: bytes) -> None:
        """Leave a note of this rank for rank 0."""

    def marked(self, rank: int) -> bytes | None:
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

    def inside(self) -> Sequence[Place]:
        """The places in this one that have a manifest."""

    def parent(self) -> Place:
        """Where its siblings are."""

    def remove(self, save_id: str) -> None:
        """Delete a whole checkpoint, so that nobody ever sees a part of it."""

    def clean(self) -> None:
        """Remove what killed saves have left among the siblings."""


class ForeignPlace(ABC):
    """A backend in the format of others, which opens and writes it itself. Saves are synchronous.

    Attributes:
        where: its path, for messages.
        name: the last part of it.
    """

    where: str
    name: str

    @abstractmethod
    def opened(self, model: nn.Module) -> Store:
        """The checkpoint, open, with the names of `model`. Raises CheckpointError where there is none."""

    @abstractmethod
    def write(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any, ranks: Ranks
    ) -> None:
        """Save (a collective call); it appears whole or not at all."""


def place_of_path(path: str | os.PathLike[str]) -> Place:
    """The backend "safetensors": a directory, or a URL of fsspec."""
    text = os.fspath(path)
    if "://" not in text:
        return LocalPlace(path)
    from meshwright_checkpoint.storage.object_store import ObjectPlace

    return ObjectPlace(text)


def place_of(path: str | os.PathLike[str], backend: str = DEFAULT) -> Place:
    """The place of `path` in a backend that has this package's format; else as `any_place_of`.

    Raises:
        PluginError: no plugin registers that name.
        UsageError: the backend has a format of its own.
    """
    place = any_place_of(path, backend)
    if isinstance(place, ForeignPlace):
        raise UsageError(
            f"backend {backend!r} has another format, for load() and save() only: load(path, backend={backend!r}), then save() "
            "without it"
        )
    return place


def any_place_of(path: str | os.PathLike[str], backend: str = DEFAULT) -> Place | ForeignPlace:
    """The place of `path` in the backend of that name. Raises PluginError for a name that no plugin registers."""
    if backend == DEFAULT:
        return place_of_path(path)
    from meshwright_dtensor.plugins import BackendSpec, discover

    place: Place | ForeignPlace = discover().get(BackendSpec, backend).load()(path)
    return place


def local_path(place: Place) -> Path | None:
    """Its directory, where it has one."""
    return place.path if isinstance(place, LocalPlace) else None
