"""The communication log: every collective of a parallel model, with the module and the reason.

``with communication() as log: ...`` collects :class:`CommEvent` from conversions, composites and engines.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from meshwright_dtensor.trace.module_stack import FRAMES, named_modules_tracked
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.html import table_html


@dataclass(frozen=True, slots=True)
class Site:
    """Module and function that ask for a collective."""

    module: str = ""
    function: str = ""


NOWHERE = Site()

COLUMNS = ("axis", "pass", "collective", "count", "bytes", "module", "why")
"""Titles of the table of a log."""


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        axis: mesh axis name.
        nbytes: bytes of the full tensor on that axis (the local input of a reduction, the local output of a gather).
        phase: ``forward`` or ``backward``.
        module: fully qualified name of the module whose forward needed it, where known.
        function: torch function or engine that needed it.
        why: the states converted, such as ``"P->I"``.
    """

    kind: str
    axis: str
    nbytes: int
    phase: str = "forward"
    module: str = ""
    function: str = ""
    why: str = ""


class CommLog:
    """Events in the order they were performed on this rank."""

    # not a context variable: a backward pass runs on other threads
    _active: ClassVar[tuple[CommLog, ...]] = ()

    def __init__(self) -> None:
        self.events: list[CommEvent] = []

    def counts(self) -> dict[tuple[str, str, str], int]:
        """(axis, phase, kind) -> number of collectives."""
        return dict(Counter((e.axis, e.phase, e.kind) for e in self.events))

    def nbytes(self) -> dict[tuple[str, str, str], int]:
        """(axis, phase, kind) -> bytes."""
        total: Counter[tuple[str, str, str]] = Counter()
        for e in self.events:
            total[e.axis, e.phase, e.kind] += e.nbytes
        return dict(total)

    def rows(self) -> list[tuple[str, str, str, int, int, str, str]]:
        """(axis, phase, kind, count, bytes in all, module, why), alike collectives as one row, most bytes first."""
        totals: dict[tuple[str, str, str, str, str], list[int]] = {}
        for e in self.events:
            module = re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "*", e.module, count=1)
            why = " for ".join(filter(None, (e.why, e.function)))
            entry = totals.setdefault((e.axis, e.phase, e.kind, module, why), [0, 0])
            entry[0] += 1
            entry[1] += e.nbytes
        rows = [(*key[:3], entry[0], entry[1], *key[3:]) for key, entry in totals.items()]
        return sorted(rows, key=lambda row: -row[4])

    def __str__(self) -> str:
        """A table; numbers of modules are "*"."""
        from meshwright_dtensor.utils.console import as_text, full_width, table_of

        if not self.events:
            return "no communication\n"
        table = table_of(COLUMNS, self._cells(), right=("count", "bytes"))
        return as_text([table], full_width(table))

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        if not self.events:
            return "<p>no communication</p>"
        return table_html(COLUMNS, self._cells(), right=("count", "bytes"))

    def _cells(self) -> Iterator[tuple[object, ...]]:
        for axis, phase, kind, count, nbytes, module, why in self.rows():
            yield axis, phase, kind.replace("_", "-"), count, human_bytes(nbytes), module, why

    @classmethod
    def listening(cls) -> bool:
        """Whether any log is open."""
        return bool(cls._active)


@contextlib.contextmanager
def communication() -> Iterator[CommLog]:
    """Collect the collectives performed inside."""
    log = CommLog()
    tracking = named_modules_tracked() if not CommLog._active else contextlib.nullcontext()
    CommLog._active = (*CommLog._active, log)
    try:
        with tracking:
            yield log
    finally:
        CommLog._active = tuple(other for other in CommLog._active if other is not log)


def current_site(function: str) -> Site:
    """The running module and ``function``; :data:`NOWHERE` while no log is open."""
    if not CommLog._active:
        return NOWHERE
    frame = FRAMES.current()
    return Site("" if frame is None else frame.where, function)


def record(
    kind: str,
    axis: str,
    nbytes: int,
    phase: str = "forward",
    module: str = "",
    function: str = "",
    why: str = "",
) -> None:
    """Report a collective to the open logs."""
    for log in CommLog._active:
        log.events.append(CommEvent(kind, axis, nbytes, phase, module, function, why))
