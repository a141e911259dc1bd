"""Find the newest copy in memory of which the ranks that there are hold every file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.peer_copies.held_file import Generation, HeldFile
from meshwright_checkpoint.peer_copies.host_folder import HostFolder
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read.wanted import ReadFile
from meshwright_checkpoint.saving.background import about_save, manifest_of, merge_notes
from meshwright_checkpoint.storage.checkpoint import Checkpoint


class HeldCheckpoint(Checkpoint):
    """A checkpoint in the memory of the ranks.

    Attributes:
        generation: which one.
        files: what this rank's host has of it.
    """

    def __init__(self, generation: Generation, manifest: Manifest, files: list[HeldFile]) -> None:
        super().__init__(_InMemory(f"the copy in memory of step {generation.step}", manifest))  # type: ignore[arg-type]
        self.generation, self.files = generation, files


class _InMemory:
    """What an open checkpoint needs of its storage."""

    def __init__(self, where: str, manifest: Manifest) -> None:
        self.where, self._manifest = where, manifest

    def manifest(self) -> Manifest:
        return self._manifest

    def open(self, name: str) -> ReadFile:
        raise CorruptError(f"{self.where} is damaged: it refers to a tensor that it does not have")


def newest(
    folder: HostFolder, local: Sequence[int], ranks: Ranks, saved: int | None, last: int | None
) -> tuple[HeldCheckpoint | None, list[str]]:
    """The newest copy that is whole, and why newer ones are not used (a collective call; equal on all ranks but for the files).

    Args:
        local: the ranks of this host.
        saved: the step of the last checkpoint of the run that is whole, None without one. Older copies are not used.
        last: the same of those that are there, whole or damaged. No copies are used that were made when the run had a later
            checkpoint: somebody has removed that to go back.
    """
    names = folder.files()
    present: dict[Generation, set[int]] = {}
    for on_rank in ranks.gather([[*vars(generation).values(), rank] for generation, rank in names.values()]):
        for start, step, save_id, size, rank in on_rank:
            present.setdefault(Generation(start, step, save_id, size), set()).add(rank)
    reasons: list[str] = []
    for generation in sorted(present, reverse=True):
        if saved is not None and generation.step < saved:
            continue
        what = f"the copy of step {generation.step}"
        missing = sorted(set(range(generation.ranks)) - present[generation])
        if missing:
            reasons.append(f"{what} lacks the file of rank {', '.join(map(str, missing[:8]))}")
            continue
        paths = [name for name, (of, _) in names.items() if of == generation]
        files, notes, broken = _sound(folder, paths, local, ranks)
        if len(notes) < generation.ranks:
            reasons.append(f"{what} is damaged: {'; '.join(broken[:3])}")
            continue
        try:
            before, manifest = notes[0]["saved"], _manifest(generation, notes)
            gone = before is not None and (last is None or before > last)
        # of another release, say; the notes are the same on all ranks, so all of them are here
        except (CheckpointError, LookupError, TypeError, ValueError, AttributeError) as error:
            reasons.append(f"{what} is damaged, or of another version: {type(error).__name__}: {error}")
            continue
        if gone:
            reasons.append(
                f"{what} is of a run with a checkpoint of step {before}, which is not there any more"
            )
            continue
        return HeldCheckpoint(generation, manifest, files), reasons
    return None, reasons


def _sound(
    folder: HostFolder, names: Sequence[str], local: Sequence[int], ranks: Ranks
) -> tuple[list[HeldFile], dict[int, Any], list[str]]:
    """The sound files of this host, by rank the notes of those of all hosts, and what is wrong with others (a collective call).

    Each rank verifies its share of the files of its host.
    """
    opened: dict[str, HeldFile] = {}
    notes: dict[str, Any] = {}
    broken: list[str] = []
    for name in names[local.index(ranks.rank) :: len(local)]:
        try:
            opened[name] = HeldFile(folder.path / name)
            notes[name] = opened[name].note
        except (OSError, ValueError, KeyError, TypeError) as error:
            broken.append(f"{name}: {error}")
    gathered = ranks.gather([notes, broken])
    sound: dict[int, Any] = {}
    for of_rank, _ in gathered:
        for name, note in of_rank.items():
            sound[int(name.split("-")[3])] = note
    here = {name for rank in local for name in gathered[rank][0]}
    files = [opened[name] if name in opened else HeldFile(folder.path / name, check=False) for name in here]
    return files, sound, [text for _, texts in gathered for text in texts]


def _manifest(generation: Generation, notes: Mapping[int, Any]) -> Manifest:
    """The manifest of a copy. Raises CorruptError: the files do not belong together."""
    ordered = [notes[rank] for rank in range(generation.ranks)]
    types = {key: kind for note in ordered for key, kind in note["types"].items()}
    about = about_save(generation.id, generation.step, generation.ranks)
    return manifest_of(types, ordered, {**about, **ordered[0]["about"], **merge_notes(ordered)})
