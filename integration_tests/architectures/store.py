"""Rows on disk, so that a long sweep can be cut into parts: one JSON line per architecture and part."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from .catalogue import Architecture, architectures
from .judge import Verdict
from .sweep import Row


def append(path: Path, row: Row) -> None:
    """Add a row to the file at `path`, made if need be."""
    verdicts = {layout: asdict(verdict) for layout, verdict in row.verdicts.items()}
    with path.open("a") as file:
        file.write(
            json.dumps({"name": row.architecture.name, "unbuildable": row.unbuildable, "verdicts": verdicts})
            + "\n"
        )


def load(paths: Iterable[Path]) -> dict[str, Row]:
    """Name -> what all files say of it, in the catalogue's order; of one layout, the last line holds."""
    by_name: dict[str, Architecture] = {each.name: each for each in architectures()}
    rows = {name: Row(each) for name, each in by_name.items()}
    loaded = set()
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            row = rows[entry["name"]]
            loaded.add(entry["name"])
            row.unbuildable = entry["unbuildable"]
            for layout, fields in entry["verdicts"].items():
                wrong = tuple((name, relative) for name, relative in fields.pop("wrong"))
                row.verdicts[layout] = Verdict(**fields, wrong=wrong)
    return {name: row for name, row in rows.items() if name in loaded}
