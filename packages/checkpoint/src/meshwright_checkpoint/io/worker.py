"""A background thread that runs tasks one after the other, and low thread priority for background saves."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
NICE = 19
"""Priority (niceness) of a background save. On a busy core each of its threads gets about 1.5% of the time."""


class Worker(Generic[T]):
    """One worker thread. Close it.

    Unlike an executor it accepts tasks after the main thread has ended, when a save may still run.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after all earlier tasks."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Wait for all tasks and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            future, work = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                # raised by future.result()
                future.set_exception(error)
            else:
                future.set_result(result)


def yield_to_training() -> None:
    """Lower the priority of this thread and of threads that it starts (Linux)."""
    if sys.platform == "linux":
        with suppress(OSError):
            here = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, here, os.getpriority(os.PRIO_PROCESS, here) + NICE)
