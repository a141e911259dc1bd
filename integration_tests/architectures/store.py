"""Rows on disk, so that a long sweep can be cut into parts: one JSON line per architecture and part."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .catalogue import Architecture, architectures
from .judge import Verdict


@dataclass
class Row:
    """One line of the table: verdicts by layout, or why there are none.

    `days`: layout -> when it was run.
    """

    architecture: Architecture
    unbuildable: str = ""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    days: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        today = str(datetime.datetime.now(tz=datetime.UTC).date())
        self.days = {layout: self.days.get(layout, today) for layout in self.verdicts}

    def complete(self, layouts: Iterable[str]) -> bool:
        """Whether there is nothing left to run."""
        return bool(self.unbuildable) or all(layout in self.verdicts for layout in layouts)

    def update(self, later: Row) -> None:
        """Take over what a later run says."""
        self.unbuildable = later.unbuildable
        self.verdicts |= later.verdicts
        self.days |= later.days


def append(path: Path, row: Row) -> None:
    """Add a row to the file at `path`, made if need be."""
    verdicts = {layout: asdict(verdict) for layout, verdict in row.verdicts.items()}
    entry = {
        "name": row.architecture.name,
        "unbuildable": row.unbuildable,
        "verdicts": verdicts,
        "days": row.days,
    }
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def load(paths: Iterable[Path]) -> dict[str, Row]:
    """Name -> what all files say of it, in the catalogue's order; of one layout, the last line holds."""
    rows = {each.name: Row(each) for each in architectures()}
    loaded = set()
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            loaded.add(entry["name"])
            verdicts = {}
            for layout, fields in entry["verdicts"].items():
                wrong = tuple((name, relative) for name, relative in fields.pop("wrong"))
                eager = tuple(fields.pop("eager", ()))
                verdicts[layout] = Verdict(**fields, wrong=wrong, eager=eager)
            row = rows[entry["name"]]
            row.update(Row(row.architecture, entry["unbuildable"], verdicts, entry.get("days", {})))
    return {name: row for name, row in rows.items() if name in loaded}
