"""The store of a job, whose requests end also where its host or the link to it is lost: torch's would wait for it to no end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Request = tuple[Callable[[Any], Any], Future[Any]]

STORE_SECONDS = 10.0
"""How long the store may take to answer."""

END_SECONDS = 1.0
"""How long the end of a connection waits for an answer."""


class SilentStoreError(RuntimeError):
    """The store has not answered."""

    def __init__(self) -> None:
        super().__init__(
            "the store of the job, on the host of rank 0, does not answer: that host or its link is lost"
        )


class BoundedStore:
    """Requests to a store, over a connection of their own. For one thread.

    All of them raise RuntimeError: the store has ended; SilentStoreError: it has not answered, now or before.
    """

    def __init__(self, connect: Callable[[], Any], seconds: float = STORE_SECONDS) -> None:
        """`connect`: makes the connection. `seconds`: that a request may take."""
        self._seconds, self._silent = seconds, False
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        # a daemon, since nothing wakes it where it waits for an answer
        arguments = (connect, self._requests)
        thread = threading.Thread(target=_serve, args=arguments, name="meshwright store", daemon=True)
        thread.start()
        # also when the interpreter ends
        weakref.finalize(self, _end, self._requests, thread)

    def _ask(self, request: Callable[[Any], T]) -> T:
        answer: Future[T] = Future()
        if not self._silent:
            self._requests.put((request, answer))
            try:
                return answer.result(self._seconds)
            except TimeoutError:
                self._silent = True
        raise SilentStoreError

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(lambda store: bool(store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask(lambda store: bytes(store.get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        return self._ask(lambda store: [bytes(value) for value in store.multi_get(list(keys))])

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        # a write alone has no answer
        self._ask(lambda store: (store.set(key, value), store.check([key])))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        return self._ask(lambda store: int(store.add(key, amount)))

    def delete_key(self, key: str) -> None:
        """Remove a key."""
        self._ask(lambda store: store.delete_key(key))


def _end(requests: SimpleQueue[Request | None], thread: threading.Thread) -> None:
    requests.put(None)
    thread.join(END_SECONDS)


def _serve(connect: Callable[[], Any], requests: SimpleQueue[Request | None]) -> None:
    store, failure = None, None
    try:
        # before it is needed: the store may end first
        store = connect()
    except BaseException as error:
        failure = error
    while (given := requests.get()) is not None:
        request, answer = given
        try:
            if failure is not None:
                raise failure
            answer.set_result(request(store))
        except BaseException as error:
            # raised by the thread that asks
            answer.set_exception(error)
        del request, answer, given
