"""List the checkpoints of a directory, find the latest, and remove old ones."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.manifest import NAME, Manifest
from meshwright_checkpoint.storage.backend import CheckpointStorage, local_path, storage_of_path
from meshwright_dtensor.errors import UsageError


def checkpoints(path: str | os.PathLike[str]) -> list[str]:
    """Complete checkpoints in the directory `path`, oldest first: by step, then by time of creation."""
    return [storage.where for storage, _ in _sorted(storage_of_path(path))]


def latest(path: str | os.PathLike[str]) -> str | None:
    """The path of the latest complete checkpoint in the directory `path`, None if there is none.

    It lists the directory, without a pointer file that could be stale. Leftovers of killed saves do not count.

    Raises UsageError: the path is a checkpoint or a file. None would restart the run without notice.
    """
    storage = storage_of_path(path)
    directory = local_path(storage)
    if directory is not None and (directory.is_file() or (directory / NAME).is_file()):
        what = "a file" if directory.is_file() else "a checkpoint itself"
        text = f"latest() needs a directory of checkpoints, and {storage.where} is {what}; pass its parent directory"
        raise UsageError(text)
    paths = checkpoints(path)
    return paths[-1] if paths else None


def _sorted(parent: CheckpointStorage) -> list[tuple[CheckpointStorage, Manifest]]:
    """The checkpoints whose files all exist with their full length."""
    complete = []
    for storage in parent.children():
        with suppress(CheckpointError):
            manifest = storage.manifest()
            if all(storage.nbytes(file.name) == file.nbytes for file in manifest.files):
                complete.append((storage, manifest))
    return sorted(complete, key=lambda c: (-1 if c[1].step is None else c[1].step, c[1].created, c[0].name))


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep; see `save`. None keeps all. Raises UsageError for numbers below 1."""

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                text = (
                    f"{name}={value!r} is not a positive integer; pass at least 1, or None to keep everything"
                )
                raise UsageError(text)
        if self.keep_every is not None and self.keep_last is None:
            raise UsageError(f"keep_every={self.keep_every} only adds to keep_last; pass keep_last too")

    def apply(self, committed: CheckpointStorage) -> None:
        """Remove old checkpoints in the parent of `committed`. Checkpoints without a step are kept."""
        if self.keep_last is None:
            return
        steps = [(storage, m.id, m.step) for storage, m in _sorted(committed.parent()) if m.step is not None]
        for storage, save_id, step in steps[: -self.keep_last]:
            kept = self.keep_every is not None and step % self.keep_every == 0
            if not kept and storage.where != committed.where:
                storage.remove(save_id)
