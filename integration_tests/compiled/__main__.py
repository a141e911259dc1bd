"""python -m integration_tests.compiled [--model NAME] [--layout LAYOUT] [--steps N] [--backend BACKEND]."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
from collections.abc import Sequence

from meshwright_dtensor.testing.rank_pool import RankPool

from .runs import LAYOUTS, MODELS, compiled_run, plan_of


def main(arguments: Sequence[str] | None = None) -> int:
    """A line of a table for each run."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.compiled")
    parser.add_argument("--model", action="append", default=[], choices=list(MODELS), help="repeatable")
    parser.add_argument("--layout", action="append", default=[], choices=list(LAYOUTS), help="repeatable")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    options = parser.parse_args(arguments)
    print("| model | layout | loss | gradient | masks | compiled calls | other calls | why |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with RankPool() as pool:
        for layout in options.layout or LAYOUTS:
            for name in options.model or MODELS:
                start = time.monotonic()
                plan = plan_of(name, layout, options.backend).to_json()
                runs = pool.run(
                    LAYOUTS[layout][0], compiled_run, name, layout, plan, options.steps, timeout=600
                )
                worst = max(runs, key=lambda run: run.gradient)
                rows = [row for run in runs for row in run.rows]
                why = "; ".join(dict.fromkeys(reason for row in rows for reason, _ in row.reasons))
                cells = [
                    *(name, layout, f"{worst.loss:.1e}", f"{worst.gradient:.1e}"),
                    "equal" if all(run.drawn for run in runs) else "OTHER",
                    *(sum(row.compiled for row in rows), sum(row.other for row in rows)),
                    why + (f" MISSING {worst.missing}" if worst.missing else ""),
                ]
                print(f"| {' | '.join(map(str, cells))} |  ({time.monotonic() - start:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
