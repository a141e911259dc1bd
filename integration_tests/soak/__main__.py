"""python -m integration_tests.soak [--steps 2000] [--interval 50] [--layout LAYOUT]: do ranks of a long run hold more and more?

Exit code 1 where memory or open files have grown by half a percent or more over the last half.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from meshwright_dtensor.testing.rank_pool import RankPool

from .long_run import LAYOUTS, growth, run_layout, table

LIMIT = 0.005


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration_tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    arguments = parser.parse_args()
    worst = 0.0
    for layout in arguments.layout or LAYOUTS:
        start = time.monotonic()
        with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
            ranks = run_layout(pool, layout, Path(folder), arguments.steps, arguments.interval)
        print(f"{layout}: {arguments.steps} steps, {time.monotonic() - start:.0f} s", flush=True)
        print("\n".join(table(ranks)), flush=True)
        worst = max(worst, *(growth(held, what) for held in ranks for what in ("memory", "handles")))
    return int(worst >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
