"""Go on from the newest checkpoint of a folder that is whole: `load_latest`. All ranks agree which one that is.

Damage of a manifest, and files that are missing or too short, are seen in the folder. Damage of values is seen while they are
loaded: then the next older checkpoint is loaded over them. Only damage leads to an older one. A checkpoint that does not fit the
model, has another version or cannot be reached raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.loading import load
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.storage.backend import storage_of
from meshwright_checkpoint.storage.checkpoint_list import (
    folder_of,
    found_in,
    new_path,
    newest_of,
    none_whole,
    warn_of_damage,
)
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.errors import MeshwrightError

T = TypeVar("T")
_log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_latest` has loaded.

    Attributes:
        path: the checkpoint.
        extra: what was saved as `extra`.
        damaged: newer checkpoints that were left out: path -> what is wrong.
    """

    path: str
    extra: Any
    damaged: dict[str, str]

    def new_path(self, name: str) -> str:
        """Where to save a checkpoint of this name in the folder; the same on every rank.

        That is `folder/name`, or where a damaged one has that name, for example "step-110", the path next to it
        ("step-110-again-110", also of step 110): `save` never overwrites.
        """
        return new_path(storage_of(self.path, DEFAULT).parent().where, name, self.damaged)


def load_latest(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint of a folder that is whole (a collective call); None where there is none yet.

    A damaged one is named in the log and in the result, and the next older one is loaded. This removes nothing. So that its
    steps can be saved again, the paths of later checkpoints are those of `LoadedCheckpoint.new_path`.

    Args:
        folder: of checkpoints, a path or a URL of fsspec that every rank sees.
        model, optimizer: as for `load`.

    Raises:
        CorruptError: there are checkpoints, and all are damaged. Model and optimizer may be partly overwritten.
        CheckpointError, MismatchError, UsageError: as `load` and `latest`, also where an older checkpoint could be loaded.
    """
    there = FolderCheckpoints(folder, Ranks())
    while (newest := there.newest()) is not None:
        path, _ = newest
        extra, damage = there.unless_damaged(partial(load, path, model=model, optimizer=optimizer))
        if not damage:
            if there.damaged and there.ranks.rank == 0:
                _log.warning("loaded the older checkpoint %s", path)
            return LoadedCheckpoint(path, extra, dict(there.damaged))
        there.leave_out(path, damage)
    there.check_any_whole()
    return None


class FolderCheckpoints:
    """The checkpoints of a folder, without those that were found damaged. All methods are collective calls.

    Attributes:
        damaged: path -> what is wrong, of those that were found damaged; equal on all ranks.
        last_step: the largest step of those that are there, damaged or not; None without one.
    """

    def __init__(self, folder: str | os.PathLike[str], ranks: Ranks) -> None:
        self.folder, self.ranks = os.fspath(folder), ranks
        self.damaged: dict[str, str] = {}
        self.last_step: int | None = None

    def newest(self) -> tuple[str, Manifest] | None:
        """Path and manifest of the newest that is not known to be damaged, None without one. Raises as `latest`."""
        while True:
            # of rank 0: another rank may see the folder later
            path, damaged, self.last_step = self.ranks.result_of_first(self._look)
            for where, damage in damaged:
                self.leave_out(where, damage)
            if path is None:
                return None
            # and what a rank alone cannot read is an error on all, before the calls that need every rank
            read = waiting_for_storage()(storage_of(path, DEFAULT).manifest)
            manifest, damage = self.unless_damaged(partial(self.ranks.run_checked, read))
            if manifest is not None:
                return path, manifest
            self.leave_out(path, damage)

    def _look(self) -> list[Any]:
        """What this rank sees: the path of the newest, the damaged ones that are newer, and the last step."""
        all_found = found_in(folder_of(self.folder))
        newest, damaged = newest_of(all_found, self.damaged)
        steps = [each.step for each in all_found if each.step is not None]
        return [
            None if newest is None else newest.storage.where,
            [[each.storage.where, str(each.problem)] for each in damaged],
            max(steps, default=None),
        ]

    def leave_out(self, path: str, damage: str) -> None:
        """From now on take none but older ones. damage: what is wrong with this one."""
        self.damaged[path] = damage
        if self.ranks.rank == 0:
            warn_of_damage(path, damage)

    def check_any_whole(self) -> None:
        """Raise CorruptError where all that were found are damaged."""
        if self.damaged:
            raise none_whole(self.folder, self.damaged)

    def unless_damaged(self, work: Callable[[], T]) -> tuple[T | None, str]:
        """The result of a collective call and "", or None and what is damaged: the same text on every rank.

        Raises what the call raises for any other reason than damage, on every rank.
        """
        result: T | None = None
        error: MeshwrightError | None = None
        try:
            result = work()
        except MeshwrightError as caught:
            error = caught
        state = 0 if error is None else 1 if isinstance(error, CorruptError) else 2
        (worst,) = self.ranks.most([state])
        if not worst:
            return result, ""
        told = None if error is None else str(error)
        texts = self.ranks.gather(
            [told if state == worst else None, error is not None and error.rank is not None]
        )
        if worst == 2 and state == 2:
            assert error is not None
            raise error
        # the text of the rank that has seen it, not of those that it has told
        rank, text = next(
            ((rank, text) for rank, (text, is_told) in enumerate(texts) if text and not is_told),
            next((rank, text) for rank, (text, _) in enumerate(texts) if text),
        )
        if worst == 2:
            raise CheckpointError(f"rank {rank} failed: {text}") from error
        return None, text if self.ranks.size == 1 else f"{text} (seen by rank {rank})"
