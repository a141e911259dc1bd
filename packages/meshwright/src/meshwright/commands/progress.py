"""What a command does, and for how long, on a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from meshwright import ranks

Phase = Callable[[str], None]
"""Says what is done now."""


@contextlib.contextmanager
def progress(phase: str, quiet: bool = False) -> Iterator[Phase]:
    """Inside, a line on stderr says what is done and for how long, and what the packages log of it; the next output replaces it.

    There is none where stderr is no terminal, where `quiet`, and on ranks other than the first. Yields what begins another phase.
    """
    if quiet or not sys.stderr.isatty() or ranks.rank():
        yield lambda phase: None
        return
    from meshwright_dtensor.utils.console import (
        Console,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(phase, total=None)
        logged = _Logged(lambda text, now: shown.update(task, description=text, refresh=now))
        with _listening(logged):
            yield logged.begin


class _Logged(logging.Handler):
    """Shows a phase, and the last that was logged in it."""

    def __init__(self, show: Callable[[str, bool], None]) -> None:
        """show: called with the text, and whether it is to be seen at once: of each kind of message, the first is."""
        super().__init__(logging.INFO)
        self._show, self._phase, self._kind = show, "", ""

    def begin(self, phase: str) -> None:
        """Another phase begins."""
        self._phase = phase
        self._show(phase, True)

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self._phase}: {record.getMessage()}" if self._phase else record.getMessage()
        self._show(text, record.msg != self._kind)
        self._kind = record.msg


@contextlib.contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("meshwright_planner")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
