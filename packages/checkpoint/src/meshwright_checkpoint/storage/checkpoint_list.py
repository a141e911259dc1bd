"""List the checkpoints of a directory, whole and damaged ones, and find the latest."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import NAME, Manifest
from meshwright_checkpoint.storage.backend import CheckpointStorage, local_path, storage_of_path
from meshwright_checkpoint.storage.filesystem import DirectoryStorage
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.errors import UsageError

_log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Found:
    """A checkpoint in a directory.

    Attributes:
        step: None without one. Where the manifest cannot be read, it is the number at the end of the name.
        problem: why it cannot be loaded, as far as its manifest and the sizes of its files tell. A CorruptError: it is damaged.
    """

    storage: CheckpointStorage
    step: int | None
    created: str = ""
    save_id: str = ""
    problem: CheckpointError | None = None


def checkpoints(path: str | os.PathLike[str]) -> list[str]:
    """Complete checkpoints in the directory `path`, oldest first: by step, then by time of creation."""
    return [each.storage.where for each in found_in(storage_of_path(path)) if each.problem is None]


def latest(path: str | os.PathLike[str]) -> str | None:
    """The path of the latest complete checkpoint in the directory `path`, None if there is none.

    It lists the directory, without a pointer file that could be stale. Leftovers of killed saves do not count. Later ones that are
    damaged are named in the log; of values, whose checksums only `load` verifies, `load_latest` sees damage too.

    Raises:
        UsageError: the path is a checkpoint or a file. None would restart the run without notice.
        CorruptError: there are checkpoints, and all of them are damaged.
        CheckpointError: the latest cannot be read: it has another version, or the storage fails.
    """
    storage = folder_of(path)
    newest, damaged = newest_of(found_in(storage))
    if newest is None and damaged:
        raise none_whole(storage.where, {each.storage.where: str(each.problem) for each in damaged})
    for each in damaged:
        warn_of_damage(each.storage.where, str(each.problem))
    return None if newest is None else newest.storage.where


def folder_of(path: str | os.PathLike[str]) -> CheckpointStorage:
    """A directory of checkpoints. Raises UsageError: it is a checkpoint itself, or a file."""
    storage = storage_of_path(path)
    directory = local_path(storage)
    if directory is not None and (directory.is_file() or DirectoryStorage(directory).is_checkpoint()):
        what = "a file" if directory.is_file() else "a checkpoint itself"
        text = f"latest() needs a directory of checkpoints, and {storage.where} is {what}; pass its parent directory"
        raise UsageError(text)
    return storage


def newest_of(all_found: Sequence[Found], left_out: Collection[str] = ()) -> tuple[Found | None, list[Found]]:
    """The newest one that is whole and not in `left_out` (their paths), None without one; and the damaged ones that are newer.

    Raises the error of one that is newer and cannot be read for another reason than damage.
    """
    damaged: list[Found] = []
    for each in reversed(all_found):
        if each.storage.where in left_out:
            continue
        if each.problem is None:
            return each, damaged
        if not isinstance(each.problem, CorruptError):
            raise each.problem
        damaged.append(each)
    return None, damaged


def warn_of_damage(where: str, damage: str) -> None:
    """Say in the log that a checkpoint is left out."""
    later = "This removes nothing, but a later save with keep_last may"
    _log.warning("checkpoint %s is left out, for it is damaged: %s. %s", where, damage, later)


def new_path(folder: str, name: str, damaged: Collection[str]) -> str:
    """Where a checkpoint of this name goes: next to a damaged one "step-4" it is "step-4-again-4", which is of the same step."""
    again = name
    while storage_of_path(f"{folder}/{again}").where in damaged:
        again = f"{again}-again{'' if (step := step_of(name)) is None else f'-{step}'}"
    return f"{folder}/{again}"


def none_whole(folder: str, damaged: dict[str, str]) -> CorruptError:
    """The error where all checkpoints of a folder are damaged. damaged: path -> what is wrong."""
    texts = "; ".join(f"{where}: {damage}" for where, damage in damaged.items())
    return CorruptError(
        f"no checkpoint of {folder} is whole, so there is none to go on from: {texts}. Restore one of them, or begin anew in "
        "another folder"
    )


@waiting_for_storage()
def found_in(parent: CheckpointStorage) -> list[Found]:
    """All checkpoints in a directory, oldest first: by step, then by time of creation."""
    all_found = [_look(storage) for storage in parent.children()]
    if any(each.problem is not None for each in all_found):
        # not those that were removed while they were read
        there = {storage.name for storage in parent.children()}
        all_found = [each for each in all_found if each.problem is None or each.storage.name in there]
    if isinstance(parent, DirectoryStorage):
        for storage in parent.without_manifest():
            problem = CorruptError(f"{storage.where}/{NAME} is missing")
            all_found.append(Found(storage, step_of(storage.name), problem=problem))
    return sorted(all_found, key=lambda f: (-1 if f.step is None else f.step, f.created, f.storage.name))


def _look(storage: CheckpointStorage) -> Found:
    manifest: Manifest | None = None
    problem: CheckpointError | None = None
    try:
        manifest = storage.manifest()
        problem = _missing(storage, manifest)
    except CheckpointError as error:
        problem = error
    if manifest is None:
        return Found(storage, step_of(storage.name), problem=problem)
    return Found(storage, manifest.step, manifest.created, manifest.id, problem)


def _missing(storage: CheckpointStorage, manifest: Manifest) -> CorruptError | None:
    """What is wrong with the sizes of the files; None where nothing is. Raises CheckpointError: that cannot be told."""
    for file in manifest.files:
        nbytes = storage.nbytes(file.name)
        if nbytes != file.nbytes:
            have = "is missing" if nbytes is None else f"has {nbytes} bytes, and {file.nbytes} were written"
            return CorruptError(f"{storage.where}/{file.name} {have}")
    return None


def step_of(name: str) -> int | None:
    """The number at the end of a checkpoint's name, None without one."""
    match = re.search(r"(\d{1,18})$", name)
    return int(match[1]) if match else None
