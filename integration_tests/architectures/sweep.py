"""Run architectures in layouts, on reused ranks, and go on where a sweep was cut off."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .attempts import attempts
from .catalogue import Architecture
from .layouts import Layout
from .store import Row, append, load
from .subject import Subject
from .tiny import Tiny

RENEWED = 20
"""After so many architectures ranks start afresh, so that what they remember of models does not pile up."""


def sweep(
    architectures: Sequence[Architecture],
    layouts: Mapping[str, Layout],
    store: Path | None = None,
    subject: Callable[[Architecture], Subject] = Tiny,
) -> list[Row]:
    """Rows in the order of `architectures`, told as they come; whatever goes wrong is in the row.

    `store`: a file of rows, to which new ones are added. What is complete in it is not run again, but shown.
    """
    rows = load([store]) if store else {}
    todo = [a for a in architectures if a.name not in rows or not rows[a.name].complete(layouts)]
    for first in range(0, len(todo), RENEWED):
        group = todo[first : first + RENEWED]
        tried = attempts([subject(each) for each in group], layouts)
        for place, (architecture, result) in enumerate(zip(group, tried, strict=True), first + 1):
            row = Row(architecture, result) if isinstance(result, str) else Row(architecture, "", result)
            rows.setdefault(architecture.name, row).update(row)
            if store:
                append(store, row)
            print(
                f"{place:3}/{len(todo)} {architecture.task:10} {architecture.name} {_told(row)}", flush=True
            )
    return [rows[each.name] for each in architectures]


def _told(row: Row) -> str:
    told = row.unbuildable and f"not built: {row.unbuildable[:160]}"
    for layout, verdict in row.verdicts.items():
        told += (
            f"  {layout}: {verdict.kind} {verdict.worst:.1e} {verdict.seconds:.1f}s {verdict.reason[:160]}"
        )
    return told


def argument_parser(program: str) -> argparse.ArgumentParser:
    """What the command lines of sweeps have in common."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument(
        "--only", action="append", default=[], help="classes whose name contains this; repeatable"
    )
    parser.add_argument(
        "--store",
        type=Path,
        help="a file of results: architectures in it are not run again, new results are added",
    )
    return parser


def wanted(architectures: Sequence[Architecture], only: Sequence[str]) -> list[Architecture]:
    """Those whose name contains any of `only`; all, if that is empty."""
    return [a for a in architectures if not only or any(part in a.name for part in only)]
