"""Which checkpoints there are beside each other, which is the latest, and which may go."""

from __future__ import annotations

import os
from dataclasses import dataclass

from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.manifest import NAME, Manifest
from meshwright_checkpoint.storage.backend import CheckpointStorage, local_path, storage_of_path
from meshwright_dtensor.errors import UsageError


def manifest_if_complete(storage: CheckpointStorage) -> Manifest | None:
    """The manifest of a checkpoint whose files are all there in full length; None where it is not whole."""
    try:
        manifest = storage.manifest()
    except CheckpointError:
        return None
    return manifest if all(storage.nbytes(file.name) == file.nbytes for file in manifest.files) else None


def checkpoints(path: str | os.PathLike[str]) -> list[str]:
    """The whole checkpoints in the directory `path`, oldest first: by step, then by time of creation."""
    return [storage.where for storage, _ in _sorted(storage_of_path(path))]


def latest(path: str | os.PathLike[str]) -> str | None:
    """The path of the latest whole checkpoint in the directory `path`, None where there is none.

    Found by looking, never from a pointer that could be stale: what a killed save has left does not count.

    Raises:
        UsageError: the path is that of a checkpoint, or of a file: a run would begin anew, unseen.
    """
    storage = storage_of_path(path)
    directory = local_path(storage)
    if directory is not None and (directory.is_file() or (directory / NAME).is_file()):
        what = "a file" if directory.is_file() else "a checkpoint itself"
        raise UsageError(
            f"latest() looks in a directory of checkpoints, and {storage.where} is {what}; give what it is in"
        )
    paths = checkpoints(path)
    return paths[-1] if paths else None


def _sorted(parent: CheckpointStorage) -> list[tuple[CheckpointStorage, Manifest]]:
    complete = [
        (storage, manifest)
        for storage in parent.children()
        if (manifest := manifest_if_complete(storage)) is not None
    ]
    return sorted(
        complete,
        key=lambda pair: (-1 if pair[1].step is None else pair[1].step, pair[1].created, pair[0].name),
    )


@dataclass(frozen=True)
class Retention:
    """What to keep; see `save`. None keeps everything."""

    keep_last: int | None = None
    keep_every: int | None = None

    @classmethod
    def of(cls, keep_last: int | None, keep_every: int | None) -> Retention:
        """Check the arguments of `save`. Raises UsageError."""
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(
                    f"{name}={value!r} is no positive number; give at least 1, or None to keep everything"
                )
        if keep_every is not None and keep_last is None:
            raise UsageError(
                f"keep_every={keep_every} says what to keep beyond keep_last; give keep_last too"
            )
        return cls(keep_last, keep_every)

    def apply(self, committed: CheckpointStorage) -> None:
        """Remove what is not to be kept beside `committed`, which is committed. Checkpoints without a step are left alone."""
        if self.keep_last is None:
            return
        steps = [(storage, m) for storage, m in _sorted(committed.parent()) if m.step is not None]
        for storage, manifest in steps[: -self.keep_last]:
            kept = (
                self.keep_every is not None
                and manifest.step is not None
                and manifest.step % self.keep_every == 0
            )
            if not kept and storage.where != committed.where:
                storage.remove(manifest.id)
