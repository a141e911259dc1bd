"""A thread that does what it is given, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


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
