"""python -m integration_tests.architectures [--only NAME] [--layout LAYOUT] [--write PATH]."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .catalogue import architectures
from .compiled_page import compiled_page
from .layouts import COMPILED, LAYOUTS
from .store import load
from .sweep import argument_parser, sweep, wanted
from .table import page, tally, terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when everything that could be built passed, or was refused."""
    parser = argument_parser("integration_tests.architectures")
    parser.add_argument(
        "--layout", action="append", default=[], choices=[*LAYOUTS, *COMPILED], help="repeatable"
    )
    parser.add_argument(
        "--write", type=Path, help="where the page goes; by default docs/architectures.md, if all is run"
    )
    options = parser.parse_args(arguments)
    layouts = {name: {**LAYOUTS, **COMPILED}[name] for name in options.layout or LAYOUTS}
    everything = architectures()
    chosen = wanted(everything, options.only)
    console, start = Console(), time.monotonic()
    rows = sweep(chosen, layouts, options.store)
    console.print(terminal(rows, list(layouts)))
    console.print(f"{dict(tally(rows))} in {time.monotonic() - start:.0f} s")
    path = options.write
    if path is None and len(chosen) == len(everything) and all(row.complete(LAYOUTS) for row in rows):
        path = Path(__file__).parents[2] / "docs" / "architectures.md"
    if path is not None and layouts.keys() <= COMPILED.keys():
        # parts of the sweep that were run before
        stored = list(load([options.store]).values()) if options.store else rows
        path.write_text(compiled_page(stored, list(layouts)))
    elif path is not None:
        path.write_text(page(rows, [name for name in LAYOUTS if any(name in row.verdicts for row in rows)]))
        console.print(f"wrote {path}")
    return int(not {"passed", "refused"}.issuperset(tally(rows)))


if __name__ == "__main__":
    sys.exit(main())
