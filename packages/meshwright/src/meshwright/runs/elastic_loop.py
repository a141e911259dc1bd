"""`mw.elastic`: the steps of a user's own loop, which goes on where it ended, with the ranks that there are."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.ranks import signals
from meshwright.runs.loss_guard import LossGuard, fault_on_all
from meshwright.runs.run_states import LastState, RunStates
from meshwright.runs.stragglers import StragglerWatch, watch_stragglers
from meshwright_checkpoint import CheckpointError
from meshwright_checkpoint.format.json_values import encode
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.state import rng
from meshwright_checkpoint.state.optimizer_set import AnyOptimizer, as_one
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import extremes
from meshwright_dtensor.utils.checksum import checksum

_KEYS = {"step", "place", "state"}
_NEW_KEYS = {"left_out", "losses"}
"""Those that checkpoints of earlier releases lack."""

_log = logging.getLogger("meshwright")


def elastic(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    state: Mapping[str, Any] | None = None,
    interval: int = 100,
    keep_last: int | None = 2,
    keep_every: int | None = None,
    spike: float | None = None,
    rewinds: int = 3,
    peer_copies: int | None = None,
    stragglers: int | None = 100,
) -> ElasticLoop:
    """A loop that is started again after any end, with any number of ranks, and goes on (a collective call)::

        run = mw.elastic("run", model=model, optimizer=optimizer, state={"scheduler": scheduler})
        for step, batch in run.batches(loader, 1000):
            ...

    What `folder` has of an earlier start is loaded now: parameters, buffers, optimizer, random streams, `state`. A damaged
    checkpoint is left out: the log and `run.damaged` name it, and the newest whole one is loaded.

    Args:
        folder: of checkpoints, a path or a URL of fsspec that every rank sees; "step-N" in it is written after step N.
        model, optimizer: as for `mw.save`, on a plan for the ranks that there are now. Several models, or one and its average,
            are an nn.ModuleDict; several optimizers are a list.
        state: name -> object with state_dict() and load_state_dict(), such as a scheduler; equal on all ranks.
        interval: steps between two checkpoints, which are written in the background.
        keep_last, keep_every: see `mw.save`.
        spike: `run.rewind(loss)` goes back also for a loss above so many times the median of the last 50; None: for NaN and
            infinity alone.
        rewinds: how often it goes back before a new checkpoint is reached.
        peer_copies: steps between two copies of the state in the memory of the hosts, each on two of them;
            ranks that torchrun starts again go on from the last one, and need no checkpoint of the folder while one of the two
            hosts is there. None: no copies.
        stragglers: every so many steps the ranks compare how long a step takes each of them, see `mw.watch_stragglers`. None:
            they do not.

    Raises:
        UsageError: an argument is wrong, or another one on another rank, or the folder is that of another loop.
        CheckpointError: a checkpoint cannot be read for another reason than damage, or does not fit (see `mw.load`), or the memory
            of a host has no room for the copies.
        CorruptError: all checkpoints are damaged.
    """
    guard = LossGuard(spike, rewinds)
    _check_ranks_agree(
        folder=os.fspath(folder),
        state=sorted(state or {}),
        interval=interval,
        keep_last=keep_last,
        keep_every=keep_every,
        spike=spike,
        rewinds=rewinds,
        peer_copies=peer_copies,
        stragglers=stragglers,
    )
    states = RunStates(folder, Retention(keep_last, keep_every), peer_copies)
    run = ElasticLoop(states, model, as_one(optimizer), dict(state or {}), interval, guard)
    if stragglers is not None:
        run.watch = watch_stragglers(model, interval=stragglers)
    return run


def _check_owner(name: str, owner: Any) -> None:
    """Raise UsageError: an object of `state` has no state dict, or one that only `model` and `optimizer` can have."""
    kind = f"state[{name!r}] is a {type(owner).__name__}"
    if not (hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")):
        raise UsageError(f"{kind}, which has no state_dict() and load_state_dict()")
    if isinstance(owner, torch.optim.Optimizer):
        raise UsageError(
            f"{kind}: give it among the optimizers, optimizer=[...], so that its states fit any plan"
        )
    if any(hasattr(value, "device_mesh") for value in tree_leaves(owner.state_dict())):
        raise UsageError(
            f"{kind} with distributed values; so that they fit any plan, give it among the models: "
            f"model=torch.nn.ModuleDict({{'model': model, {name!r}: ...}})"
        )


def _check_ranks_agree(**options: Any) -> None:
    """Raise UsageError, on every rank, where a rank has other options: it would save, copy or go back alone."""
    ranks = Ranks()
    if ranks.same(options):
        return
    first, *others = ranks.gather(options)
    for rank, other in enumerate(others, 1):
        for name, value in other.items():
            if value != first[name]:
                raise UsageError(
                    f"mw.elastic has {name}={value!r} on rank {rank}, and {name}={first[name]!r} on rank 0; "
                    "give every rank the same"
                )


class ElasticLoop:
    """See `elastic`.

    Attributes:
        step: steps that are done, also by earlier starts.
        received: the signal (SIGTERM, SIGINT) after which the loop ended; 0 if none.
        left_out: batches that were left out by `rewind`, also by earlier starts.
        watch: names slow ranks; None where nothing is compared.
    """

    def __init__(
        self,
        states: RunStates,
        model: nn.Module,
        optimizer: AnyOptimizer,
        state: dict[str, Any],
        interval: int,
        guard: LossGuard,
    ) -> None:
        if type(interval) is not int or interval < 1:
            raise UsageError(f"interval={interval!r} is not a number of steps; pass at least 1")
        for name, owner in state.items():
            _check_owner(name, owner)
        self.step = self.received = self.left_out = 0
        self.watch: StragglerWatch | None = None
        self._guard, self._goes_back = guard, False
        self._states, self._model, self._optimizer, self._state = states, model, optimizer, state
        self._interval, self._ranks = interval, Ranks()
        self._batches: _Batches | None = None
        self._place: dict[str, Any] | None = None
        self._runs = False
        self._load(states.last())
        states.check_room(model, optimizer)

    @property
    def damaged(self) -> dict[str, str]:
        """Checkpoints that were found damaged, so that the run went on from an older state: path -> what is wrong."""
        return dict(self._states.damaged)

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left of `total`, counted from 0.

        A checkpoint is written after each `interval` of steps, after the last, and when a rank has received SIGTERM or SIGINT:
        the loop then ends after the step, and `received` says so. What follows the loop runs when it is written. After a
        `break`, or an error in the loop, a checkpoint that could not be written is a warning in the log.

        Raises:
            UsageError: another loop of this object runs.
            CheckpointError: a checkpoint could not be written.
        """
        if self._runs:
            raise UsageError(
                "steps() or batches() of one mw.elastic runs already; a run has one loop at a time"
            )
        self._runs = True
        try:
            with signals() as arrived:
                while self.step < total and not self.received:
                    yield self.step
                    if self._goes_back:
                        self._go_back()
                        continue
                    self.step += 1
                    if self.watch is not None:
                        self.watch.end_step()
                    self.received = arrived()
                    if self._ranks.size > 1:
                        ((_, self.received),) = extremes([self.received], None)
                    if self.received or self.step == total or self.step % self._interval == 0:
                        self._guard.forgive()
                        self._states.save(self._model, self._optimizer, self._extra(), self.step)
                    self._states.copy(self._model, self._optimizer, self._extra, self.step)
            self._states.end(self.step)
        finally:
            self._runs = False
            if self.watch is not None:
                self.watch.pause()
            # after a `break`, or an error in the loop
            try:
                self._states.wait(for_silent=False)
            except CheckpointError as error:
                # the error of the loop, if there is one, is raised
                _log.warning("the last checkpoint is lost: %s", error)

    def batches(self, loader: Iterable[Any], total: int) -> Iterator[tuple[int, Any]]:
        """The steps that are left of `total`, with the batch of each: what a run that never ended would see.

        `loader` is iterated epoch after epoch. In an epoch that had begun, the batches before are loaded again and left out;
        a loader with state_dict() and load_state_dict() finds its place by itself.

        Raises as `steps`, and UsageError: the loader has no batch, or fewer than it had.
        """
        self._batches, place = _Batches(loader, self._place), self._place
        source, first = iter(self._batches), self.step
        try:
            for step in self.steps(total):
                batch = next(source)
                if step == first:
                    self._check_place(self._batches.place())
                yield step, batch
        finally:
            self._place = self._batches.place() or place
            self._batches = None

    def rewind(self, loss: Any) -> bool:
        """Whether the loss of this step is no number, infinite or a spike, on any rank (a collective call)::

            if run.rewind(loss):
                continue

        The loop then goes back to the last checkpoint: model, optimizer, `state` and random streams. Batches go on, so those since
        that checkpoint are left out; a loop over `steps`, whose batches are its own, adds `left_out` to the number of the step.

        loss: a number, or a tensor of one, before or after the step of the optimizer.

        Raises:
            UsageError: it is not called in the loop.
            FloatingPointError: it has gone back too often before it came to a new checkpoint, or there is none to go back to.
        """
        if not self._runs:
            raise UsageError("rewind(loss) is called outside of the loop over steps() or batches()")
        reason = self._guard.fault_of(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        # equal on all ranks where the loss is that of the whole batch; a loss of one rank counts for all
        reason = fault_on_all(reason)
        if not reason:
            return False
        self._guard.count(f"step {self.step}: {reason}")
        _log.warning("step %d: %s; going back to the last checkpoint", self.step, reason)
        self._goes_back = True
        return True

    def _go_back(self) -> None:
        left = self.left_out + self.step + 1
        self._goes_back = False
        if self.watch is not None:
            # reading a checkpoint is no part of a step
            self.watch.pause()
        # a step that was not taken has left them
        self._model.zero_grad()
        if not self._load(self._states.committed(), in_memory=False):
            raise FloatingPointError(
                f"step {self.step}: there is no checkpoint yet to go back to; begin with a smaller learning rate, or save "
                "more often (interval=)"
            )
        self.left_out = left - self.step

    def _load(self, state: LastState | None, in_memory: bool = True) -> bool:
        """Load a state of the run, or an older one where it is damaged. Whether there is one."""
        if state is None:
            return False
        state, extra = self._states.load(state, self._model, self._optimizer, in_memory)
        path = state.where
        if not isinstance(extra, dict) or not _KEYS <= extra.keys() <= _KEYS | _NEW_KEYS:
            raise UsageError(f"{path} was not written by mw.elastic; give another folder, or use mw.load")
        missing = sorted(extra["state"].keys() ^ self._state.keys())
        if missing:
            raise UsageError(
                f"{path} has the state of {sorted(extra['state'])}, not of {sorted(self._state)}"
            )
        for name, owner in self._state.items():
            owner.load_state_dict(extra["state"][name])
        self.step, self._place, self.left_out = extra["step"], extra["place"], extra.get("left_out", 0)
        self._guard.last = extra.get("losses", [])
        return True

    def _extra(self) -> dict[str, Any]:
        place = self._place if self._batches is None else self._batches.place()
        self._check_place(place)
        state = {name: owner.state_dict() for name, owner in self._state.items()}
        counts = {"step": self.step, "left_out": self.left_out, "losses": self._guard.last}
        return {"place": place, "state": state, **counts}

    def _check_place(self, place: dict[str, Any] | None) -> None:
        """Raise UsageError, on every rank, for a loader with another place on each rank: that of rank 0 alone is saved."""
        if place is None or "loader" not in place or self._ranks.size == 1:
            return
        if not self._ranks.same(encode(place, lambda _, tensor: str(checksum(tensor)), "the loader's state")):
            raise UsageError(
                "state_dict() of the loader differs between ranks, and a run may go on with other ranks: give run.batches a loader "
                "of global batches that is the same on every rank, or use run.steps, with the loader in a checkpoint of your own"
            )


class _Batches:
    """The batches of a loader, epoch after epoch, from `place` on."""

    def __init__(self, loader: Iterable[Any], place: dict[str, Any] | None) -> None:
        self._loader, self._from = loader, place
        self._finds_place = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        # random streams before the epoch, and how many of its batches were taken
        self._streams: dict[str, torch.Tensor] | None = None
        self._taken = 0

    def place(self) -> dict[str, Any] | None:
        """Where the next batch is; None before the first."""
        if self._finds_place:
            loader: Any = self._loader
            return {"loader": loader.state_dict()}
        return None if self._streams is None else {"streams": self._streams, "taken": self._taken}

    def __iter__(self) -> Iterator[Any]:
        place, self._from = self._from, None
        while True:
            iterator, is_whole = self._epoch(place), place is None
            place = None
            for batch in iterator:
                self._taken += 1
                yield batch
            if is_whole and not self._taken:
                raise UsageError(
                    f"the {type(self._loader).__name__} has no batch; a loop over it would never end"
                )

    def _epoch(self, place: dict[str, Any] | None) -> Iterator[Any]:
        if place is not None and "loader" in place and self._finds_place:
            loader: Any = self._loader
            loader.load_state_dict(place["loader"])
            place = None
        if place is None:
            self._streams, self._taken = rng.state(), 0
            return iter(self._loader)
        if "streams" not in place:
            kind = type(self._loader).__name__
            raise UsageError(
                f"the run had a loader with load_state_dict(), and this {kind} has none; give it again"
            )
        streams = rng.state()
        self._streams, self._taken = place["streams"], 0
        rng.restore(place["streams"])
        iterator = iter(self._loader)
        for self._taken in range(1, place["taken"] + 1):
            if next(iterator, self) is self:
                rule = (
                    f"{place['taken']} batches of the epoch were taken before, and it has {self._taken - 1}"
                )
                raise UsageError(f"{rule}; go on with the same data, or give another folder")
        rng.restore(streams)
        return iterator
