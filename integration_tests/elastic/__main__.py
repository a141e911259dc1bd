"""python -m integration_tests.elastic [--kills 200] [--seed 1]: kills from outside of whole elastic runs, one run after another."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from .kills import losses, spread, torture


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m integration_tests.elastic", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start, done, runs, worst = time.monotonic(), 0, 0, 0.0
    with tempfile.TemporaryDirectory() as parent:
        whole = Path(parent, "whole")
        whole.mkdir()
        torture(whole, 0, 0)
        wanted = losses(whole)
        while done < arguments.kills:
            folder = Path(parent, str(runs))
            folder.mkdir()
            done += torture(folder, min(25, arguments.kills - done), arguments.seed + runs)
            runs += 1
            distances = [abs(a - b) / b for a, b in zip(losses(folder), wanted, strict=True)]
            worst = max(worst, spread(folder), *distances)
            print(
                f"{done} kills, {runs} runs, largest distance of a loss {worst:.1e}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    assert worst < 1e-4


if __name__ == "__main__":
    main()
