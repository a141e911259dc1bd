"""`mw.watch_stragglers`: names the ranks that are slower than the others, who wait for them in every step.

All ranks take equally long for a step, since each waits for the slowest in its collectives. So the time of a step is divided: what
a rank does not spend waiting for others is its own. Every n-th step each rank measures its own part of it (see `Waits`), and the
parts of all ranks are gathered and compared. Ranks of different stages of a pipeline have different work, and are not compared.
"""

from __future__ import annotations

import logging
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_checkpoint.rank_messages import Ranks
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.devices.waits import Waits
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import control_group, message_device
from meshwright_dtensor.utils.bytesize import human_seconds
from meshwright_parallel.placement.inputs import placement_of

LEAST_SHARE = 0.05
"""A rank is slow only if the others wait for it for so large a part of the step."""

_log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow.

    Attributes:
        rank, host: which one.
        seconds: of a step, without those in which it waits for others.
        median: the same of the ranks that it is compared with, without it.
    """

    rank: int
    host: str
    seconds: float
    median: float


def watch_stragglers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    interval: int = 100,
    *,
    factor: float = 1.5,
    checks: int = 3,
) -> StragglerWatch:
    """Name slow ranks, in the log of rank 0 and in `watch.slow` of every rank (a collective call).

    Every `interval`-th step is measured. A rank is slow whose own part of the step is more than `factor` times the median of the
    others, by at least 5 percent of the step; with a pipeline, of the others of its stage. It is named once it was slow in
    `checks` measured steps one after the other, and again when it has not been for as many.

    Args:
        model: a parallel model.
        optimizer: a step ends where this one's `step()` has. None: where `watch.end_step()` is called, on every rank.

    Returns the watch; its `remove` ends it.

    Raises UsageError: a number is out of range.
    """
    placed = placement_of(model)
    stage = 0
    if placed is not None and "pp" in (names := placed.mesh.mesh_dim_names or ()):
        stage = placed.mesh.get_local_rank(names.index("pp"))
    watch = StragglerWatch(stage, interval, factor, checks)
    if optimizer is not None:
        watch.handle = optimizer.register_step_post_hook(lambda *_: watch.end_step())
    return watch


class StragglerWatch:
    """See `watch_stragglers`.

    Attributes:
        slow: the ranks that are slow now, as of the last measured step.
        handle: of the hook that calls `end_step`, if any.
    """

    def __init__(
        self,
        stage: int,
        interval: int,
        factor: float = 1.5,
        checks: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """stage: ranks of different stages are not compared. clock: of seconds."""
        for name, number in (("interval", interval), ("checks", checks)):
            if type(number) is not int or number < 1:
                raise UsageError(f"{name}={number!r} of the watch for slow ranks; give a number from 1 on")
        if not factor > 1:
            raise UsageError(
                f"factor={factor!r} of the watch for slow ranks; give a number above 1, such as 1.5"
            )
        self.slow: tuple[Straggler, ...] = ()
        self.handle: Any = None
        self._interval, self._factor, self._checks = interval, factor, checks
        self._steps, self._waits, self._measures = 0, Waits(clock), False
        # a loop that ends by an error leaves the watch, and nobody would end the measurement
        weakref.finalize(self, self._waits.stop)
        self._group = control_group() if dist.is_initialized() else None
        told = Ranks(self._group).gather([socket.gethostname(), stage])
        self._hosts = [host for host, _ in told]
        # ranks that are compared with each other
        self._peers = [
            [r for r, (_, s) in enumerate(told) if s == each] for each in sorted({s for _, s in told})
        ]
        # rank -> checks one after the other that speak against what is said of it
        self._against = [0] * len(told)

    def end_step(self) -> None:
        """A step has ended; every rank has to call it (a collective call after each `interval` of steps)."""
        if len(self._hosts) == 1:
            return
        self._steps += 1
        if self._measures:
            self._measures = False
            seconds, waited = self._waits.end()
            self._compare(*self._gathered(seconds - waited, seconds))
        if (self._steps + 1) % self._interval == 0:
            self._measures = True
            self._waits.begin()

    def pause(self) -> None:
        """Forget the step that is being measured: no step follows, or not at once."""
        self._waits.stop()
        self._measures = False

    def remove(self) -> None:
        """Watch no more."""
        self.pause()
        if self.handle is not None:
            self.handle.remove()

    def _gathered(self, *seconds: float) -> list[list[float]]:
        """Each number of all ranks, in their order."""
        mine = torch.tensor(seconds, dtype=torch.float64, device=HOST).to(message_device(self._group))
        everyone = mine.new_zeros(len(self._hosts) * len(seconds))
        dist.all_gather_single(everyone, mine, group=self._group)
        columns: list[list[float]] = everyone.view(-1, len(seconds)).T.tolist()
        return columns

    def _compare(self, active: Sequence[float], steps: Sequence[float]) -> None:
        """Judge a step. active, steps: seconds of each rank, the part that is its own and the whole."""
        was, now = {each.rank for each in self.slow}, []
        for ranks in self._peers:
            medians = medians_of_others([active[rank] for rank in ranks]) if len(ranks) > 1 else []
            # the only rank of its stage is compared with nobody
            for rank, median in zip(ranks, medians, strict=False):
                is_slow = (
                    active[rank] > self._factor * median
                    and active[rank] - median >= LEAST_SHARE * steps[rank]
                )
                self._against[rank] = self._against[rank] + 1 if is_slow != (rank in was) else 0
                changes = self._against[rank] == self._checks
                if changes:
                    self._against[rank] = 0
                    self._tell(Straggler(rank, self._hosts[rank], active[rank], median), is_slow)
                if is_slow if changes else rank in was:
                    now.append(Straggler(rank, self._hosts[rank], active[rank], median))
        self.slow = tuple(sorted(now, key=lambda each: each.rank))

    def _tell(self, rank: Straggler, is_slow: bool) -> None:
        if dist.get_rank(self._group) == 0:
            who = f"rank {rank.rank} on {rank.host} is {'slow' if is_slow else 'not slow any more'}"
            fix = "; look for other processes, heat and slow storage there (meshwright doctor --health)"
            _log.warning(
                "%s: a step takes it %s and the others %s (the median), without the time in which they wait%s",
                who,
                human_seconds(rank.seconds),
                human_seconds(rank.median),
                fix if is_slow else "",
            )


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of at least two values the median of the others, of an even number of others the lower one."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for place, index in enumerate(order):
        medians[index] = values[order[middle + (place <= middle)]]
    return medians
