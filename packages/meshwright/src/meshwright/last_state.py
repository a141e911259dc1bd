"""The last state of a run: a copy in the memory of its hosts, else the last checkpoint of its folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from meshwright_checkpoint import latest, load
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.peer_copies.copies import PeerCopies
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.storage.backend import storage_of
from meshwright_dtensor.utils.names import count_of

_log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class LastState:
    """A state from which a run can go on.

    Attributes:
        where: for messages.
        manifest: of the checkpoint, in memory or in the folder.
        saved: the step of the last checkpoint in the folder, None without one.
        load: fills a model and its optimizer in any layout, and returns what was saved as `extra` (a collective call).
    """

    where: str
    manifest: Manifest
    saved: int | None
    load: Callable[[nn.Module, Any], Any]


def last_state(folder: str | os.PathLike[str], copies: PeerCopies | None = None) -> LastState | None:
    """The last state of the run, None for a new run (a collective call).

    With `copies` the log has a line: from where the run goes on, and why not from a newer copy.
    """
    ranks = Ranks()
    # of rank 0: another rank may see the folder later
    path = ranks.result_of_first(lambda: latest(folder))
    manifest = None if path is None else storage_of(path, DEFAULT).manifest()
    saved = None if manifest is None else manifest.step
    held, reasons = (None, []) if copies is None else copies.newest(saved)
    state = None
    if held is not None and copies is not None:
        from_memory = partial(copies.load, held)
        state = LastState(held.where, held.manifest, saved, from_memory)
    elif path is not None and manifest is not None:

        def from_folder(model: nn.Module, optimizer: Any) -> Any:
            extra = load(path, model=model, optimizer=optimizer)
            if copies is not None:
                copies.drop(None)
            return extra

        state = LastState(path, manifest, saved, from_folder)
    if copies is not None and ranks.rank == 0 and (state is not None or reasons):
        source = "the beginning" if state is None else f"step {state.manifest.step}, of {state.where}"
        hosts = f"{count_of(ranks.size, 'rank')} on {count_of(copies.hosts, 'host')}"
        _log.warning("%s: going on from %s%s", hosts, source, f" ({'; '.join(reasons)})" if reasons else "")
    return state
