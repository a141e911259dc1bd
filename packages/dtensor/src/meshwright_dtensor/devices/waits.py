"""How long a rank waits for the others in the collectives of a parallel model: what is left of a step is the rank's own.

Each place that waits does so inside of `waiting()`, which costs nothing while nobody measures. While somebody does, the stream of
the accelerator is waited for before and after, so that time on the device is told apart like time of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist

from meshwright_dtensor.devices import default_device


class Waits:
    """The seconds in which this process has waited, from `begin` to `end`. `clock`: of seconds."""

    # not a context variable: a backward pass may run on another thread
    _measuring: ClassVar[tuple[Waits, ...]] = ()

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begun, self._waited, self._depth = clock, 0.0, 0.0, 0

    def begin(self) -> None:
        """Measure from now on."""
        default_device().wait_for_stream()
        self._begun, self._waited, self._depth = self._clock(), 0.0, 0
        Waits._measuring = (*Waits._measuring, self)

    def end(self) -> tuple[float, float]:
        """Seconds since `begin`, and those of them in which this process has waited for others."""
        self.stop()
        default_device().wait_for_stream()
        return self._clock() - self._begun, self._waited

    def stop(self) -> None:
        """Measure no more."""
        Waits._measuring = tuple(other for other in Waits._measuring if other is not self)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._entered = self._clock()

    def _leave(self) -> None:
        self._depth -= 1
        # 0 where it began inside of a wait
        if self._depth == 0:
            self._waited += self._clock() - self._entered


class _Waiting:
    """A wait that is measured."""

    def __enter__(self) -> None:
        self._for = Waits._measuring
        default_device().wait_for_stream()
        for waits in self._for:
            waits._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        default_device().wait_for_stream()
        for waits in self._for:
            waits._leave()


_NOT_MEASURED = nullcontext()


def waiting() -> AbstractContextManager[Any]:
    """Inside, this process waits for other ranks."""
    return _Waiting() if Waits._measuring else _NOT_MEASURED


def wait_for(work: dist.Work | None) -> None:
    """Wait until an operation of torch.distributed has ended. None: it has."""
    if work is not None:
        with waiting():
            work.wait()
