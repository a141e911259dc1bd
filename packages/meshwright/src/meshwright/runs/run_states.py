"""The states of a run: checkpoints in its folder and copies in the memory of its hosts, which are written in step.

A run goes on from the last one: from a copy in memory, else from the last checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from meshwright_checkpoint import SaveHandle, latest, load, save
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.peer_copies.copies import PeerCopies
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.storage.backend import storage_of
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.utils.names import count_of

_log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class LastState:
    """A state from which a run can go on.

    Attributes:
        where: for messages.
        manifest: of the checkpoint, in memory or in the folder.
        load: fills a model and its optimizer in any layout, and returns what was saved as `extra` (a collective call).
    """

    where: str
    manifest: Manifest
    load: Callable[[nn.Module, Any], Any]


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
        self.copies = None if peer_copies is None else PeerCopies(folder, peer_copies)
        self.saved: int | None = None
        self._saving: SaveHandle | None = None

    # --- going on ---------------------------------------------------------------------------------------------------------

    def last(self, in_memory: bool = True) -> LastState | None:
        """The last state of the run, None for a new run (a collective call). `in_memory`: a copy in memory may be it.

        With copies in memory the log has a line: from where the run goes on, and why not from a newer copy.
        """
        ranks, copies = self._ranks, self.copies if in_memory else None
        # of rank 0: another rank may see the folder later
        path = ranks.result_of_first(lambda: latest(self._folder))
        # and what a rank alone cannot read is an error on all, before the calls that need every rank
        manifest = None if path is None else ranks.run_checked(lambda: storage_of(path, DEFAULT).manifest())
        self.saved = None if manifest is None else manifest.step
        held, reasons = (None, []) if copies is None else copies.newest(self.saved)
        state = None
        if held is not None and copies is not None:
            state = LastState(held.where, held.manifest, partial(copies.load, held))
        elif path is not None and manifest is not None:

            def from_folder(model: nn.Module, optimizer: Any) -> Any:
                extra = load(path, model=model, optimizer=optimizer)
                if copies is not None:
                    copies.drop(None)
                return extra

            state = LastState(path, manifest, from_folder)
        if copies is not None and ranks.rank == 0 and (state is not None or reasons):
            source = "the beginning" if state is None else f"step {state.manifest.step}, of {state.where}"
            hosts = f"{count_of(ranks.size, 'rank')} on {count_of(copies.hosts, 'host')}"
            _log.warning(
                "%s: going on from %s%s", hosts, source, f" ({'; '.join(reasons)})" if reasons else ""
            )
        return state

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
        self._saving = save(
            f"{self._folder}/step-{step}",
            model=model,
            optimizer=optimizer,
            extra=extra,
            step=step,
            keep_last=self._retention.keep_last,
            keep_every=self._retention.keep_every,
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
