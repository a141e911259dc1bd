"""A thread that does what it is given, one after the other; and how threads stay out of training's way."""

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
"""How much lower the priority of a save behind training is: a processor that is busy gives each of its threads 1.5%. When the
next save waits for it, the processor is free.
"""


class Worker(Generic[T]):
    """One thread. Close it.

    An executor refuses work once the main thread has ended, and a save goes on then.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` when all before it is done."""
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Return once all is done."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            future, work = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)
            else:
                future.set_result(result)


def yield_to_training() -> None:
    """Let this thread, and those that it starts, have what is left of the processor (on Linux a thread has a priority)."""
    if sys.platform == "linux":
        with suppress(OSError):
            here = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, here, os.getpriority(os.PRIO_PROCESS, here) + NICE)
