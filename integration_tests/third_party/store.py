"""Verdicts on disk, so that a long sweep can be cut into parts: one JSON line per model and part."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from architectures.judge import Verdict

Results = dict[str, str | dict[str, Verdict]]
"""Key of a model -> verdicts by layout, or why there are none."""


def append(path: Path, key: str, result: str | dict[str, Verdict]) -> None:
    """Add a result to the file at `path`, made if need be."""
    told = (
        result if isinstance(result, str) else {layout: asdict(verdict) for layout, verdict in result.items()}
    )
    with path.open("a") as file:
        file.write(json.dumps({"key": key, "result": told}) + "\n")


def load(path: Path) -> Results:
    """What the file says; of one layout of a model, the last line holds."""
    results: Results = {}
    verdicts: dict[str, dict[str, Verdict]] = defaultdict(dict)
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        key, result = entry["key"], entry["result"]
        if isinstance(result, str):
            results[key] = result
            continue
        for layout, fields in result.items():
            wrong = tuple((name, relative) for name, relative in fields.pop("wrong"))
            verdicts[key][layout] = Verdict(**fields, wrong=wrong)
        results[key] = verdicts[key]
    return results
