"""Every tiny architecture is planned, with nothing pinned: python -m integration_tests.architectures.planning [--only NAME].

No ranks are started: a model is built, its training batch is an example, and the planner is asked for the best plan on a
cluster that exists only as a name. Printed: how many there are, what could not be planned and why, seconds of one core, memory.

    python -m integration_tests.architectures.planning --store FILE     # go on where a sweep was cut off; again, to tally
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan

from .batches import batch_of
from .catalogue import Architecture, architectures, build
from .run_one import quiet
from .subject import SEED, NotBuildable
from .tiny import loss_of

CLUSTER, RANKS = "dgx-h100", 8


@dataclass(frozen=True)
class Planned:
    """One architecture: "planned", "failed", "not built" or "not trained", what there is to say, and the planner's seconds.

    `peak`: the most bytes that the process had had by then.
    """

    architecture: Architecture
    kind: str
    text: str
    seconds: float = 0.0
    peak: int = 0


def plan_architecture(architecture: Architecture, ranks: int = RANKS, cluster: str = CLUSTER) -> Planned:
    """The best plan of a tiny model, or why there is none."""
    quiet()
    torch.manual_seed(SEED)
    try:
        model = build(architecture)
        batch = batch_of(architecture, model)
    except NotBuildable as error:
        return Planned(architecture, "not built", str(error)[:160])
    begin = time.process_time()
    try:
        plan = mw.plan(model, batch, world_size=ranks, cluster=cluster)
        assert isinstance(plan, ParallelPlan) and plan.world_size == ranks
    except Exception as error:  # whatever planning raises is the verdict
        took = time.process_time() - begin
        trains = _trains(architecture)
        if trains:
            return Planned(architecture, "not trained", trains, took)
        return Planned(architecture, "failed", _line(error), took)
    degrees = " ".join(f"{axis}{n}" for axis, n in plan.degrees.items() if n > 1)
    return Planned(architecture, "planned", degrees, time.process_time() - begin)


def _trains(architecture: Architecture) -> str:
    """Why it does not train on one device either; nothing where it does."""
    torch.manual_seed(SEED)
    model = build(architecture)
    batch = batch_of(architecture, model)
    try:
        loss_of(model(**batch), batch).backward()
    except Exception as error:  # whatever it is, there is nothing to plan
        return _line(error)
    return ""


def stored(path: Path | None, stored_rows: Mapping[str, Architecture]) -> dict[str, Planned]:
    """Name -> what a file says of it, its last line; nothing of names that are not known."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    entries = {entry.pop("name"): entry for entry in map(json.loads, lines)}
    return {
        name: Planned(stored_rows[name], **entry) for name, entry in entries.items() if name in stored_rows
    }


def keep(path: Path | None, row: Planned) -> None:
    """Add a line to the file at `path`, made if need be."""
    if path is not None:
        entry = {
            "name": row.architecture.name,
            **{f: getattr(row, f) for f in ("kind", "text", "seconds", "peak")},
        }
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:260]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when everything that can be built and trained was planned."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.architectures.planning")
    parser.add_argument(
        "--only", action="append", default=[], help="classes whose name contains this; repeatable"
    )
    parser.add_argument("--every", type=int, default=1, help="one in so many")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument(
        "--store",
        type=Path,
        help="a file of results: architectures in it are not run again, new results are added",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [a for a in architectures() if not options.only or any(part in a.name for part in options.only)]
    chosen = chosen[:: options.every]
    begin, rows = time.monotonic(), list[Planned]()
    stored_rows = stored(options.store, {a.name: a for a in chosen})
    for architecture in chosen:
        row = stored_rows.get(architecture.name)
        if row is None:
            row = replace(plan_architecture(architecture, options.ranks, options.cluster), peak=_peak())
            keep(options.store, row)
            place = f"{len(rows) + 1:3}/{len(chosen)}"
            print(f"{place} {row.kind:11} {architecture.name} {row.seconds:.2f} s {row.text}", flush=True)
        rows.append(row)
    if not rows:
        parser.error(f"no architecture's name contains {' or '.join(options.only)}")
    tally = {kind: sum(row.kind == kind for row in rows) for kind in dict.fromkeys(row.kind for row in rows)}
    peak = max(row.peak for row in rows)
    print(
        f"{tally}; {sum(row.seconds for row in rows):.0f} s of processor time in planning, "
        f"{time.monotonic() - begin:.0f} s in all, slowest {max(rows, key=lambda row: row.seconds).architecture.name} "
        f"{max(row.seconds for row in rows):.1f} s; peak memory {peak / 2**30:.2f} GiB"
    )
    for row in rows:
        if row.kind == "failed":
            print(f"failed: {row.architecture.name}: {row.text}")
    return 1 if tally.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
