"""python -m integration_tests.architectures [--only NAME] [--layout LAYOUT] [--write PATH]."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .catalogue import architectures
from .layouts import LAYOUTS
from .store import append, load
from .sweep import Row, sweep
from .table import page, tally, terminal


def main() -> int:
    """Exit code 0 when everything that could be built passed."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.architectures", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], help="classes whose name contains this; repeatable"
    )
    parser.add_argument("--layout", action="append", default=[], choices=list(LAYOUTS), help="repeatable")
    parser.add_argument(
        "--write", type=Path, help="where the page goes; by default docs/architectures.md, if all is run"
    )
    parser.add_argument(
        "--store",
        type=Path,
        help="a file of results: architectures in it are not run again, new results are added",
    )
    arguments = parser.parse_args()
    layouts = arguments.layout or list(LAYOUTS)
    chosen = [
        a for a in architectures() if not arguments.only or any(part in a.name for part in arguments.only)
    ]
    console, start = Console(), time.monotonic()
    rows_by_name = load([arguments.store] if arguments.store else [])
    todo = [a for a in chosen if a.name not in rows_by_name or not _complete(rows_by_name[a.name], layouts)]
    rows: list[Row] = []
    for row in sweep(todo, layouts) if todo else ():
        rows.append(row)
        if arguments.store:
            append(arguments.store, row)
        console.print(_progress(row, len(rows), len(todo)), highlight=False, markup=False, soft_wrap=True)
    rows_by_name |= {row.architecture.name: row for row in rows}
    rows = [rows_by_name[each.name] for each in chosen]
    console.print(terminal(rows, layouts))
    console.print(f"{dict(tally(rows))} in {time.monotonic() - start:.0f} s")
    path = arguments.write
    if path is None and len(chosen) == len(architectures()) and layouts == list(LAYOUTS):
        path = Path(__file__).parents[2] / "docs" / "architectures.md"
    if path is not None:
        path.write_text(page(rows, layouts))
        console.print(f"wrote {path}")
    return 0 if all(verdict.passed for row in rows for verdict in row.verdicts.values()) else 1


def _complete(row: Row, layouts: Sequence[str]) -> bool:
    return bool(row.unbuildable) or all(layout in row.verdicts for layout in layouts)


def _progress(row: Row, place: int, total: int) -> str:
    told = row.unbuildable and f"not built: {row.unbuildable[:160]}"
    for layout, verdict in row.verdicts.items():
        told += (
            f"  {layout}: {verdict.kind} {verdict.worst:.1e} {verdict.seconds:.1f}s {verdict.reason[:160]}"
        )
    return f"{place:3}/{total} {row.architecture.task:10} {row.architecture.name} {told}"


if __name__ == "__main__":
    sys.exit(main())
