"""Does the planner pick the winner?  Every legal configuration of small models, predicted and then run on this machine.

    meshwright calibrate --output machine.json
    python benchmarks/planner_regret.py --cluster machine.json --json regret.json [--ranks 2,4] [--models deep,wide] [--minutes 20]
    python benchmarks/planner_regret.py --cluster machine.json --ranks 2 --schedules 1f1b,gpipe,zero-bubble --recompute full
    python benchmarks/planner_regret.py --cluster machine.json --measured regret.json      # predict anew, run nothing

For each model and world size: every combination of degrees, ZeRO stages, sequence parallelism and microbatches that the
planner accepts, under 1f1b and with nothing run again unless more is asked for, is pinned and predicted; each is run for real;
the planner is then asked without pins.

How it is measured.  The speed of a shared machine wanders by a quarter within minutes, so what is compared lives on the same
ranks at once and takes turns, a few steps each, in rounds.  All configurations run in a first pass, some at a time and the pick
among them; their time is divided by the time of the pick in the same turn.  The
fastest of it (within 25%) and the pick then run in further rounds, all of them in each.  The least of many noisy times is too
short, so the best is never judged by the turns that chose it: it is chosen by every other round and judged by the rest, then
the other way round, and the regret is the mean of both.  A turn counts with the median of its steps, a configuration with the
median of its turns.

Printed: regret (time of the pick over that of the best, less one), place of the pick, Spearman's correlation of predicted
and measured, and the noise (the spread of the turns of one configuration); over all models the median regret.  "plain" is
the regret over the least median of the further rounds, which is never below the judged one by more than noise.  Exit code 4
when a pick is in the worse half, the median regret is above 5%, or the correlation over all runs is below 0.9.  Groups that
the file of `--json` holds already are not run again, so what was broken off can be taken up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planner_regret_judging import LEADERS, Group, Run, judge, remembered, verdict
from planner_regret_models import build
from taking_turns import living_together

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankError, RankPool

WARM = 2
"""Steps after setting up that do not count."""
TURN_S, MOST_STEPS = 0.2, 6
"""Seconds that the timed steps of a turn take; at least two steps and at most so many, after one warm-up step."""
TOGETHER = 8
"""Configurations that live on the ranks at once in the first pass, in addition to the pick."""
FIRST_ROUNDS = 2
"""Rounds of the first pass."""
NEAR, MOST_ROUNDS = 1.25, 24
"""Who takes part in the further rounds: those so many times as slow as the fastest (the pick in any case); how many rounds at
most."""
FURTHER_S = 20.0
"""Seconds of further rounds at least, for each rank."""


def pins(
    ranks: int, schedules: Sequence[str] = ("1f1b",), recompute: Sequence[str | None] = (None,)
) -> Iterator[dict[str, Any]]:
    """Every way to pin what the planner searches, legal or not; with each of these schedules and ways to recompute."""
    axes = [d for d in (1, 2, 4, 8) if ranks % d == 0]
    for pp, dp, cp, ep, tp in itertools.product(axes, repeat=5):
        if pp * dp * cp * ep * tp != ranks:
            continue
        base = {axis: n for axis, n in (("pp", pp), ("dp", dp), ("cp", cp), ("ep", ep), ("tp", tp)) if n > 1}
        if dp == 1:
            base["dp"] = 1
        for stage in (0, 1, 2, 3) if dp > 1 else (0,):
            shards = [d for d in axes if 1 < d <= dp] if stage else [None]
            for shard, sequence in itertools.product(shards, (False, True) if tp > 1 else (None,)):
                ways = itertools.product((1, 2, 4, 8), schedules) if pp > 1 else [(None, None)]
                for (count, schedule), again in itertools.product(ways, recompute):
                    results = {**base, "zero": stage, "zero_degree": shard, "sequence_parallel": sequence}
                    results |= {"microbatches": count, "schedule": schedule, "recompute": again}
                    yield {key: value for key, value in results.items() if value is not None}


def configurations(name: str, ranks: int, cluster: str, *which: Any) -> list[Run]:
    """Every legal one, with what is predicted of it; `which`: see pins."""
    with mw.deferred_init():
        model, batch = build(name)
    results: dict[str, Run] = {}
    for chosen in pins(ranks, *which):
        try:
            plan = mw.plan(model, batch, world_size=ranks, cluster=cluster, planner="manual", **chosen)
        except MeshwrightError:
            continue
        assert isinstance(plan, ParallelPlan)
        results.setdefault(identity(plan), Run(" ".join(f"{k}={v}" for k, v in chosen.items()), plan))
    return list(results.values())


def identity(plan: ParallelPlan) -> str:
    """What a plan does, without what is said of it."""
    data = json.loads(plan.to_json())
    for predicted in ("provenance", "predicted", "collectives"):
        data.pop(predicted, None)
    return json.dumps(data, sort_keys=True)


def take_turns(
    rank: int, size: int, name: str, plans: list[ParallelPlan], rounds: int, least: int, seconds: float
) -> list[list[float]]:
    """Rounds in which each of some configurations takes a turn: for each the seconds of a step in each turn.

    `least`: rounds that are run in any case; no others begin when `seconds` are over.
    """
    begin = time.perf_counter()
    turns: list[list[float]] = [[] for _ in plans]
    with living_together((*build(name), plan) for plan in plans) as steps:
        for _ in range(WARM):
            for place in range(len(steps)):  # no name of ours keeps a configuration
                steps[place]()
        for number in range(rounds):
            order = range(len(steps)) if number % 2 == 0 else reversed(range(len(steps)))
            for place in order:
                wanted = torch.tensor(TURN_S / steps[place]())
                dist.broadcast(wanted, 0)  # all ranks count as many
                count = max(2, min(MOST_STEPS, round(float(wanted))))
                turns[place].append(statistics.median(steps[place]() for _ in range(count)))
            over = torch.tensor(float(number + 1 >= least and time.perf_counter() - begin > seconds))
            dist.broadcast(over, 0)
            if over:
                break
    return turns


def measure(runs: list[Run], pick: Run, name: str, ranks: int, pool: RankPool, until: float) -> None:
    """The first pass over all, then further rounds of the pick and of those that lead, until the time is over."""

    failure: list[str] = []

    def together(some: list[Run], rounds: int, least: int, seconds: float) -> list[list[float]] | None:
        try:
            plans = [run.plan for run in some]
            return pool.run(ranks, take_turns, name, plans, rounds, least, seconds, timeout=seconds + 240.0)[
                0
            ]
        except (MeshwrightError, RankError, RuntimeError) as error:
            failure.append(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
            return None

    def first(some: list[Run]) -> None:
        results = together([pick, *some], FIRST_ROUNDS, FIRST_ROUNDS, 0.0)
        if results is None and len(some) > 1:  # whichever it was
            for run in some:
                first([run])
        elif results is None:
            some[0].failed = failure[-1]
            print(f"   FAILED {some[0].name}: {some[0].failed}", flush=True)
        else:
            pick_seconds = statistics.median(results[0])
            pick.first += results[0]
            for run, turns in zip(some, results[1:], strict=True):
                run.first = [seconds / pick_seconds for seconds in turns]

    begin = time.monotonic()
    others = [run for run in runs if run is not pick]
    for start in range(0, len(others), TOGETHER):
        first(others[start : start + TOGETHER])
    if not pick.first:
        pick.failed = failure[-1] if failure else "nothing to compare it with"
        return

    def level(seconds: float) -> None:
        for run in others:
            run.first = [part * seconds for part in run.first]

    level(statistics.median(pick.first))
    done = sorted((run for run in runs if run.first), key=lambda run: run.measured)
    leaders = [run for run in done[:LEADERS] if run.measured <= NEAR * done[0].measured]
    if pick not in leaders:
        leaders.append(pick)
    left = max(FURTHER_S * ranks, until - time.monotonic())
    print(
        f"{name}, {ranks} ranks: first pass {time.monotonic() - begin:.0f} s, {left:.0f} s left for {len(leaders)}",
        flush=True,
    )
    further = together(leaders, MOST_ROUNDS, 4, left)
    if further is None:
        print(f"  no further rounds: {failure[-1]}", flush=True)
    for run, turns in zip(leaders, further or ()):
        run.turns = turns
    if pick.turns:
        level(statistics.median(pick.turns) / statistics.median(pick.first))


def planned(name: str, ranks: int, cluster: str, *which: Any) -> Group:
    """Predict every configuration, and ask for the pick; `which`: see pins."""
    runs = configurations(name, ranks, cluster, *which)
    with mw.deferred_init():
        model, batch = build(name)
    pick = mw.plan(model, batch, world_size=ranks, cluster=cluster)
    assert isinstance(pick, ParallelPlan)
    chosen = next((r for r in runs if identity(r.plan) == identity(pick)), None)
    if chosen is None:
        chosen = Run("the pick", pick)
        runs.append(chosen)
    return Group(name, ranks, runs, chosen)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", required=True, help="file that `meshwright calibrate` wrote")
    parser.add_argument("--models", default="deep,wide,moe,long,vocabulary")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of it")
    parser.add_argument(
        "--json", type=Path, default=None, help="write the results here; groups in it are kept"
    )
    parser.add_argument("--measured", type=Path, default=None, help="results to take the times from")
    parser.add_argument(
        "--schedules", default="1f1b", help="of pipelines, each with every number of microbatches"
    )
    parser.add_argument(
        "--recompute", default="", help="policies that each configuration is tried with, in addition to none"
    )
    options = parser.parse_args()
    which = options.schedules.split(","), (None, *filter(None, options.recompute.split(",")))
    groups = list(itertools.product(options.models.split(","), map(int, options.ranks.split(","))))
    end = time.monotonic() + 60 * options.minutes
    results: list[dict[str, Any]] = []
    if options.measured is not None:
        for stored_result in json.loads(options.measured.read_text()):
            if (stored_result["model"], stored_result["ranks"]) in groups:
                group = planned(stored_result["model"], stored_result["ranks"], options.cluster, *which)
                results.append(judge(remembered(group, stored_result)))
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))
        return 0 if verdict(results) else 4
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
        before = {(r["model"], r["ranks"]) for r in results}
        groups = [group for group in groups if group not in before]
    configurations = [planned(name, ranks, options.cluster, *which) for name, ranks in groups]
    with RankPool() as pool:
        for number, group in enumerate(configurations):
            weight = group.weight / sum(g.weight for g in configurations[number:])
            until = time.monotonic() + (end - time.monotonic()) * weight
            measure(group.runs, group.pick, group.model, group.ranks, pool, until)
            results.append(judge(group))
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))
    return 0 if verdict(results) else 4


if __name__ == "__main__":
    sys.exit(main())
