"""The states of a run: checkpoints in its folder and copies in the memory of its hosts, which are written in step.

A run goes on from the last one: from a copy in memory, else from the last checkpoint. Those that are damaged are left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from meshwright_checkpoint import CorruptError, SaveHandle, load
from meshwright_checkpoint.folder_checkpoints import FolderCheckpoints
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.peer_copies.copies import PeerCopies
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.saving.saving import save_and_keep
from meshwright_checkpoint.storage.checkpoint_list import new_path
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.utils.names import count_of

_log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class LastState:
    """A state from which a run can go on.

    Attributes:
        where: for messages.
        manifest: of the checkpoint, in memory or in the folder.
        fill: fills a model and its optimizer in any layout, and returns what was saved as `extra` (a collective call).
        in_memory: whether it is a copy in memory.
    """

    where: str
    manifest: Manifest
    fill: Callable[[nn.Module, Any], Any]
    in_memory: bool


class RunStates:
    """Writes the states of a run, and finds the last one.

    Attributes:
        saved: the step of the last checkpoint that is committed, None without one.
    """

    def __init__(
        self, folder: str | os.PathLike[str], retention: Retention, peer_copies: int | None = None
    ) -> None:
        """folder: of the checkpoints. peer_copies: steps between two copies in memory, None for none. Raises as `PeerCopies`."""
        self._folder, self._retention, self._ranks = os.fspath(folder), retention, Ranks()
        self._checkpoints = FolderCheckpoints(folder, self._ranks)
        self.copies = None if peer_copies is None else PeerCopies(folder, peer_copies)
        self.saved: int | None = None
        self._saving: SaveHandle | None = None

    @property
    def damaged(self) -> dict[str, str]:
        """Checkpoints that were found damaged, and left out: path -> what is wrong."""
        return self._checkpoints.damaged

    # --- going on ---------------------------------------------------------------------------------------------------------

    def last(self, in_memory: bool = True) -> LastState | None:
        """The last state of the run, None for a new run (a collective call). `in_memory`: a copy in memory may be it.

        With copies in memory the log has a line: from where the run goes on, and why not from a newer copy; also where a newer
        checkpoint is damaged.

        Raises CorruptError: all checkpoints are damaged, and there is no copy; others as `mw.latest`.
        """
        copies, checkpoints = self.copies if in_memory else None, self._checkpoints
        newest = checkpoints.newest()
        self.saved = None if newest is None else newest[1].step
        held, reasons = (None, []) if copies is None else copies.newest(self.saved, checkpoints.last_step)
        state = None
        if held is not None and copies is not None:
            state = LastState(held.where, held.manifest, partial(copies.load, held), in_memory=True)
        elif newest is not None:
            path, manifest = newest

            def from_folder(model: nn.Module, optimizer: Any) -> Any:
                extra = load(path, model=model, optimizer=optimizer)
                if copies is not None:
                    copies.drop(None)
                return extra

            state = LastState(path, manifest, from_folder, in_memory=False)
        else:
            checkpoints.check_any_whole()
        if self._ranks.rank == 0 and (checkpoints.damaged if copies is None else state or reasons):
            self._say_from(state, reasons)
        return state

    def _say_from(self, state: LastState | None, reasons: list[str]) -> None:
        source = "the beginning" if state is None else f"step {state.manifest.step}, of {state.where}"
        who = count_of(self._ranks.size, "rank")
        if self.copies is not None:
            who += f" on {count_of(self.copies.hosts, 'host')}"
        _log.warning("%s: going on from %s%s", who, source, f" ({'; '.join(reasons)})" if reasons else "")

    def load(
        self, state: LastState, model: nn.Module, optimizer: Any, in_memory: bool = True
    ) -> tuple[LastState, Any]:
        """Load a state, or where it is damaged the last one that is not (a collective call).

        in_memory: that may be a copy in memory. Returns it, and what was saved as `extra`.

        Raises CorruptError: all are damaged; others as `mw.load`, also where an older state could be loaded.
        """
        while True:
            extra, damage = self._checkpoints.unless_damaged(partial(state.fill, model, optimizer))
            if not damage:
                return state, extra
            if state.in_memory and self.copies is not None:
                if self._ranks.rank == 0:
                    _log.warning("%s is left out, for it is damaged: %s", state.where, damage)
                self.copies.drop(None)
                in_memory = False
            else:
                self._checkpoints.leave_out(state.where, damage)
            older = self.last(in_memory)
            if older is None:
                raise CorruptError(
                    f"{state.where} is damaged, and there is no other state to go on from: {damage}"
                )
            state = older

    def committed(self) -> LastState | None:
        """The last checkpoint, to go back to, once it is written (a collective call). Raises as `wait`."""
        self.wait()
        if self.copies is not None:
            # they may have the state from which the run goes back
            self.copies.forget()
        return self.last(in_memory=False)

    def check_room(self, model: nn.Module, optimizer: Any) -> None:
        """Raises CheckpointError, on all ranks: a host has no room for the copies in memory (a collective call)."""
        if self.copies is not None:
            self.copies.check_room(model, optimizer)

    # --- writing ----------------------------------------------------------------------------------------------------------

    def save(self, model: nn.Module, optimizer: Any, extra: Any, step: int) -> None:
        """Begin a checkpoint of this step. Raises CheckpointError: the one before could not be written."""
        retention = replace(self._retention, damaged=frozenset(self.damaged))
        self._saving = save_and_keep(
            new_path(self._folder, f"step-{step}", self.damaged),
            retention,
            model=model,
            optimizer=optimizer,
            extra=extra,
            step=step,
        )

    def copy(self, model: nn.Module, optimizer: Any, extra: Callable[[], Any], step: int) -> None:
        """Copy the state of this step to the memory of the hosts, if a copy is due. Raises as `PeerCopies.put`."""
        if self.copies is None or step % self.copies.interval:
            return
        if self._saving is not None and self._saving.committed:
            self.saved = self._saving.step
        self.copies.put(model, optimizer, extra(), step, self.saved)

    def wait(self, for_silent: bool = True) -> None:
        """Wait for the last checkpoint. Raises CheckpointError: it could not be written.

        for_silent: also for ranks that do not answer, as long as a collective would.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            if for_silent:
                saving.wait()
            else:
                saving.wait_for_those_that_answer()
            self.saved = saving.step

    def end(self, step: int) -> None:
        """Wait for the last checkpoint; copies in memory go where it has all that they have. Raises as `wait`."""
        self.wait()
        if self.copies is not None and self.saved == step:
            self.copies.forget()
