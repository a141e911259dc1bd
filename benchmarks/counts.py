"""Counts of work that no machine changes, of fixed small models and plans: a change that makes them grow is seen in CI.

    python benchmarks/counts.py            # the counts that have changed, and whether one has grown too much: exit code 4
    python benchmarks/counts.py --write    # rewrite benchmarks/counts.json, after a change that is meant

For a step of a tiny Llama under each layout, on real ranks: programs derived, calls of functions in a steady step (of Python and of
C, in the thread that trains), collectives, messages between stages, and their bytes. For the planner: configurations estimated
and evaluated, integer programs solved. `integration_tests/test_counts.py` compares them with the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peers import ours
from peers.model import Sizes, batch_of, model_of
from step_work import counted_calls

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.testing.rank_pool import RankPool

FILE = Path(__file__).parent / "counts.json"
SIZES = Sizes(width=32, inner=64, layers=2, heads=4, vocabulary=64, rows=4, tokens=16)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "zero": 0},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "zero3": {"zero": 3},
    "pp2": {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
}
WARM_UP, STEPS = 3, 5
MARGINS = {"calls": 0.02}
"""How much a count may grow before the test fails, by the last part of its name; others may not grow at all.

Calls: patch releases of torch and Python make some more or fewer.
"""

Counts = dict[str, int]


def step_counts(rank: int, ranks: int, layout: dict[str, Any]) -> Counts:
    """Of one layout, on this rank."""
    model = model_of(SIZES)
    step = ours.setup(model, batch_of(SIZES), **layout)
    for _ in range(WARM_UP):
        step()
    calls = []
    for _ in range(STEPS):
        with counted_calls() as count:
            step()
        calls.append(count[0])
    with communication() as log:
        step()
    contexts = {MeshContext.of(parameter.device_mesh) for parameter in model.parameters()}  # type: ignore[attr-defined]
    tiers = sum((Counter(context.report.tiers) for context in contexts), Counter[int]())
    return {
        "programs": tiers.total(),
        "programs of tier 2 and 3": tiers[2] + tiers[3],
        "calls": min(calls),
        "collectives and messages": len(log.events),
        "bytes": sum(event.nbytes for event in log.events),
    }


def planner_counts(ranks: int) -> Counts:
    """Of a search for a small Llama on a cluster of H100."""
    import meshwright_planner
    from meshwright_planner.evaluation.evaluator import Search
    from meshwright_planner.placement import ilp

    sizes = Sizes(width=512, inner=1536, layers=8, heads=8, vocabulary=8192, rows=4 * ranks, tokens=512)
    with torch.device("meta"):
        model = model_of(sizes)
    batch = {name: rows.to("meta") for name, rows in batch_of(sizes).items()}
    counts: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        return run

    with ExitStack() as stack:
        for name, owner, attribute in (
            ("configurations estimated", Search, "estimate"),
            ("configurations evaluated", Search, "evaluate"),
            ("integer programs", ilp, "milp"),
        ):
            stack.enter_context(patch.object(owner, attribute, counting(name, getattr(owner, attribute))))
        meshwright_planner.plan(model, batch, cluster="dgx-h100", world_size=ranks)
    return dict(counts)


def measure(pool: RankPool) -> Counts:
    """All counts, by name; of steps the sums over the ranks, since the sender of a message notes it."""
    counts: Counts = {}
    for name, layout in LAYOUTS.items():
        first, second = pool.run(2, step_counts, layout)
        counts |= {f"{name}: {what}": first[what] + second[what] for what in first}
    for ranks in (8, 64):
        counts |= {f"plan for {ranks} ranks: {what}": count for what, count in planner_counts(ranks).items()}
    return counts


def margin(name: str) -> float:
    """How much the count of that name may grow, as a part of it."""
    return MARGINS.get(name.rpartition(": ")[2], 0.0)


def grown(counts: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """A line for each count that is larger than its margin lets it be, is new, or is no longer measured."""
    lines = []
    for name in sorted({*counts, *allowed}):
        if name not in counts or name not in allowed:
            lines.append(f"{name}: in {'the file' if name in allowed else 'this run'} only")
        elif counts[name] > allowed[name] * (1 + margin(name)):
            lines.append(
                f"{name}: {counts[name]}, and {allowed[name]} in the file (+{100 * margin(name):g}% is allowed)"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with RankPool() as pool:
        counts = measure(pool)
    if options.write:
        FILE.write_text(json.dumps(counts, indent=1) + "\n")
        return 0
    allowed = json.loads(FILE.read_text())
    for name, count in counts.items():
        if count != allowed.get(name):
            print(f"{name}: {allowed.get(name)} -> {count}")
    lines = grown(counts, allowed)
    print("\n".join(lines) or "nothing has grown")
    return 4 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
