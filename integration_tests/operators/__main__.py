"""python -m integration_tests.operators [--only NAME] [--mesh 2] [--mesh 2x2] [--device cuda] [--part 1/4] [--write PATH]."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from .catalogue import by_name
from .judge import Outcome
from .store import append, load
from .sweep import sweep
from .table import page, tally

MESHES = {"2": ((2,), 2), "2x2": ((2, 2), 1)}
"""Name of a mesh -> its sizes, and samples of each operator on it."""


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def main() -> int:
    """Exit code 0 when every case is equal to one device or refused."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.operators", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], help="operators whose name contains this; repeatable"
    )
    parser.add_argument("--mesh", action="append", default=[], choices=list(MESHES), help="repeatable")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="cuda: the ranks share one GPU"
    )
    parser.add_argument(
        "--part", type=_part, default=(1, 1), help="K/N: the K-th of N parts, to run side by side"
    )
    parser.add_argument("--samples", type=int, help="samples of each operator")
    parser.add_argument(
        "--write", type=Path, help="where the page goes; by default docs/operators.md, if all is run"
    )
    parser.add_argument(
        "--store", type=Path, help="a file of results: operators in it are not run again, new ones are added"
    )
    arguments = parser.parse_args()
    console, start = Console(), time.monotonic()
    meshes = arguments.mesh or list(MESHES)
    names = [n for n in by_name() if not arguments.only or any(part in n for part in arguments.only)]
    part, parts = arguments.part
    names = names[part - 1 :: parts]
    outcomes: dict[str, list[Outcome]] = {}
    for mesh in meshes:
        sizes, count = MESHES[mesh]
        stored = load(arguments.store, mesh) if arguments.store else {}
        outcomes[mesh] = [o for name in names for o in stored.get(name, [])]
        todo = [name for name in names if name not in stored]
        done = 0
        for chunk, of_chunk in (
            sweep(todo, sizes, arguments.samples or count, arguments.device) if todo else ()
        ):
            outcomes[mesh] += of_chunk
            done += len(chunk)
            if arguments.store:
                append(arguments.store, mesh, chunk, of_chunk)
            counts = dict(Counter(outcome.kind for outcome in of_chunk))
            seconds = time.monotonic() - start
            console.print(
                f"{mesh} {done}/{len(todo)} {seconds:.0f}s {chunk[0]}.. {counts}",
                highlight=False,
                soft_wrap=True,
            )
            for outcome in of_chunk:
                if outcome.kind not in ("equal", "refused"):
                    console.print(
                        f"  {outcome.kind} {outcome.op} | {outcome.case} | {outcome.reason}",
                        highlight=False,
                        markup=False,
                        soft_wrap=True,
                    )
    for mesh in meshes:
        console.print(f"{mesh}: {dict(tally(outcomes[mesh]))}", highlight=False)
    console.print(f"{time.monotonic() - start:.0f} s")
    path = arguments.write
    if (
        path is None
        and not arguments.only
        and meshes == list(MESHES)
        and arguments.device == "cpu"
        and parts == 1
    ):
        path = Path(__file__).parents[2] / "docs" / "operators.md"
    if path is not None:
        path.write_text(page(names, outcomes))
        console.print(f"wrote {path}")
    kinds = {o.kind for of_chunk in outcomes.values() for o in of_chunk}
    return 0 if kinds <= {"equal", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
