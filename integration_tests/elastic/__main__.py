"""python -m integration_tests.elastic [--kills 200] [--hosts 10] [--peer-copies 1] [--seed 1]: elastic runs, killed from outside.

--hosts: how often a host of a run on several hosts is lost, and comes back (network namespaces; Linux, as root; with STEPS=240).
--shape: hosts x ranks of each. --megabits: of each link and second (tc; by default all there is).
--peer-copies: steps between two copies in memory, which are then all that the run can go on from; 0: it goes on from checkpoints.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .kills import lines, losses, spread, torture
from .lost_hosts import Shape, check_lost_work, lose_hosts
from .run_script import EVERY


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m integration_tests.elastic", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--shape", type=shape_of, default=(2, 2))
    parser.add_argument("--megabits", type=int)
    parser.add_argument("--peer-copies", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["PEER_COPIES"] = str(arguments.peer_copies)
    with tempfile.TemporaryDirectory() as parent:
        whole = Path(parent, "whole")
        whole.mkdir()
        torture(whole, 0, 0)
        worst = kill_runs(Path(parent), arguments.kills, arguments.seed, losses(whole), arguments.peer_copies)
        if arguments.hosts:
            shape = Shape(*arguments.shape, arguments.megabits)
            distances = lose(
                Path(parent), arguments.hosts, arguments.seed, losses(whole), arguments.peer_copies, shape
            )
            worst = max(worst, *distances)
    assert worst < 1e-4


def kill_runs(parent: Path, kills: int, seed: int, wanted: list[float], copies: int) -> float:
    """Kill runs so often; the largest relative distance of a loss."""
    start, done, runs, worst, again = time.monotonic(), 0, 0, 0.0, 0
    while done < kills:
        folder = parent / str(runs)
        folder.mkdir()
        done += torture(folder, min(25, kills - done), seed + runs)
        runs += 1
        worst = max(worst, distance(folder, wanted))
        again = max(again, check_lost_work(lines(folder), 2 * (copies or EVERY)))
        took = f"{time.monotonic() - start:.0f} s"
        figures = f"largest distance of a loss {worst:.1e}, at most {again} steps done again"
        print(f"{done} kills, {runs} runs, {figures}, {took}", flush=True)
    return worst


def shape_of(text: str) -> tuple[int, int]:
    """Hosts, and ranks of each, from a text such as 3x1."""
    hosts, ranks = map(int, text.split("x"))
    return hosts, ranks


def lose(
    parent: Path, count: int, seed: int, wanted: list[float], copies: int, shape: Shape
) -> Iterator[float]:
    """Lose hosts so often, twice in a run; the largest relative distances of a loss.

    Of a copy that is made at the end of a step the ranks know in the next one that it is complete.
    """
    for number in range(0, count, 2):
        folder, start = parent / f"hosts-{number}", time.monotonic()
        folder.mkdir()
        told = lose_hosts(folder, min(2, count - number), seed + number, shape)
        starts = [(line["first"], line["ranks"]) for line in lines(folder) if "first" in line]
        again = check_lost_work(lines(folder), 2 * (copies or EVERY))
        far = distance(folder, wanted)
        yield far
        took = f"at most {again} steps done again, largest distance of a loss {far:.1e}, {time.monotonic() - start:.0f} s"
        print(
            f"hosts {', '.join(told)}; starts at step, on ranks: {starts}; {took}",
            flush=True,
        )


def distance(folder: Path, wanted: list[float]) -> float:
    """Of the losses of a run from those wanted, and from each other where a step was done twice."""
    distances = [abs(a - b) / b for a, b in zip(losses(folder), wanted, strict=True)]
    return max(spread(folder), *distances)


if __name__ == "__main__":
    main()
