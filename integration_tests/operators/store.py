"""Outcomes on disk, so that a long sweep can be cut into parts: one JSON line per mesh and operator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .judge import Outcome


def append(path: Path, mesh: str, names: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Add the outcomes of these operators to the file at `path`, made if need be."""
    with path.open("a") as file:
        for name in names:
            rows = [asdict(outcome) for outcome in outcomes if outcome.op == name]
            file.write(json.dumps({"mesh": mesh, "name": name, "outcomes": rows}) + "\n")


def load(path: Path, mesh: str) -> dict[str, list[Outcome]]:
    """Operator -> its outcomes on that mesh; of an operator, the last line holds."""
    result: dict[str, list[Outcome]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["mesh"] == mesh:
            result[entry["name"]] = [Outcome(**row) for row in entry["outcomes"]]
    return result
