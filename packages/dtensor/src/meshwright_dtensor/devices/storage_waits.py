"""Where a rank waits for storage: a disk, a file system, a data set. Others may wait for it then; it waits for none of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class StorageWaits:
    """How many `waiting_for_storage()` the main thread is inside of. Other threads read it."""

    depth: ClassVar[int] = 0


@contextmanager
def waiting_for_storage() -> Iterator[None]:
    """Inside, or in a function that it decorates, this thread waits for storage, and makes no call that needs other ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    StorageWaits.depth += 1
    try:
        yield
    finally:
        StorageWaits.depth -= 1
