"""What benchmarks/planner_regret.py makes of times: runs, groups of them, the regret of a pick, and the verdict over all."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import spearmanr

from meshwright_dtensor.plan import ParallelPlan, Prediction

REGRET, CORRELATION = 0.05, 0.9
"""What acceptance asks for: the median regret at most, the correlation at least."""
FAILED = 99.0
"""The regret of a pick that does not run."""
LEADERS = 8
"""Most runs that take part in further rounds."""


@dataclass
class Run:
    """A configuration: its plan, and seconds of a step in each turn, of the first pass and of the further rounds."""

    name: str
    plan: ParallelPlan
    first: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def prediction(self) -> Prediction:
        assert self.plan.predicted is not None
        return self.plan.predicted

    @property
    def predicted(self) -> float:
        return self.prediction.step_seconds

    @property
    def measured(self) -> float:
        return statistics.median(self.turns or self.first)

    @property
    def noise(self) -> float:
        """Interquartile range of its turns, divided by their median."""
        turns = sorted(self.turns or self.first)
        return (turns[len(turns) * 3 // 4] - turns[len(turns) // 4]) / self.measured

    def half(self, which: int) -> float:
        """Median of every other further round, from the first on or from the second."""
        return statistics.median(self.turns[which::2])

    def record(self) -> dict[str, Any]:
        """For the file."""
        split = self.prediction.split
        parts = {"compute": self.prediction.compute_seconds}
        if split is not None:
            parts |= {"bubble": split.bubble_seconds, "optimizer": split.optimizer_seconds, **split.exposed}
        return {
            "name": self.name,
            "predicted": self.predicted,
            "parts": parts,
            "first": self.first,
            "turns": self.turns,
        }


def judged(pick: Run, leaders: list[Run]) -> float:
    """The regret of the pick: the best is chosen by every other round and judged by the rest, both ways; the mean, at least 0."""
    groups = []
    for choosing, judging in ((0, 1), (1, 0)):
        best = min(leaders, key=lambda run: run.half(choosing))
        groups.append(pick.half(judging) / best.half(judging) - 1)
    return max(0.0, statistics.mean(groups))


def spearman(first: list[float], second: list[float]) -> float:
    """Correlation of ranks."""
    return float(spearmanr(first, second).statistic) if len(first) > 2 else math.nan


@dataclass
class Group:
    """One model on so many ranks: its configurations, and the one among them that the planner picks."""

    model: str
    ranks: int
    runs: list[Run]
    pick: Run

    @property
    def weight(self) -> float:
        """How much of the time is its: as much for each configuration and rank in the first pass, and further rounds of some."""
        return (len(self.runs) + LEADERS) * self.ranks


def judge(group: Group) -> dict[str, Any]:
    """Print what was measured of a group, and what goes to the file."""
    chosen = group.pick
    done = sorted((r for r in group.runs if r.first or r.turns), key=lambda r: r.measured)
    leaders = [run for run in done if len(run.turns) > 1]
    print(f"\n{group.model}, {group.ranks} ranks: {len(done)} configurations", flush=True)
    for place, run in enumerate(done, 1):
        print(
            f"  {place:3} {1e3 * run.measured:8.1f} ms measured (turns {len(run.turns) or len(run.first):2}, apart "
            f"{100 * run.noise:3.0f}%) {1e3 * run.predicted:8.1f} predicted  {run.name}{' <- the pick' * (run is chosen)}"
        )
    fair = chosen in leaders
    result = {
        "model": group.model,
        "ranks": group.ranks,
        "configurations": len(done),
        "failed": [f"{r.name}: {r.failed}" for r in group.runs if r.failed],
        "pick": chosen.name,
        "regret": judged(chosen, leaders) if fair else FAILED,
        "plain": chosen.measured / min(r.measured for r in leaders) - 1 if fair else FAILED,
        "place": done.index(chosen) + 1 if chosen in done else len(group.runs),
        "spearman": spearman([r.predicted for r in done], [r.measured for r in done]),
        "noise": statistics.median([r.noise for r in leaders or done] or [0.0]),
        "rounds": max((len(r.turns) for r in leaders), default=0),
        "best": done[0].name if done else "",
        "runs": [r.record() for r in done],
    }
    print(
        f"  regret {100 * result['regret']:.1f}% (plain {100 * result['plain']:.1f}%), place {result['place']}, Spearman "
        f"{result['spearman']:.3f}; {len(leaders)} in {result['rounds']} further rounds, turns {100 * result['noise']:.0f}% apart"
    )
    return result


def remembered(group: Group, groups: dict[str, Any]) -> Group:
    """With times that were measured before, by the names of runs."""
    times = {run["name"]: run for run in groups["runs"]}
    for run in group.runs:
        stored = times.get(run.name, {})
        run.first, run.turns = list(stored.get("first", ())), list(stored.get("turns", ()))
    return group


def verdict(results: list[dict[str, Any]]) -> bool:
    """Print the sums, and whether acceptance holds."""
    by_model: dict[str, list[float]] = {}
    for result in results:
        by_model.setdefault(result["model"], []).append(result["regret"])
    regret = statistics.median(statistics.mean(values) for values in by_model.values())
    worse = [f"{r['model']}@{r['ranks']}" for r in results if r["place"] > math.ceil(r["configurations"] / 2)]
    pairs = [
        (run["predicted"], statistics.median(run["turns"] or run["first"]))
        for r in results
        for run in r["runs"]
    ]
    entries = spearman([p for p, _ in pairs], [m for _, m in pairs])
    inner = statistics.median(r["spearman"] for r in results)
    failed = sum(len(r["failed"]) for r in results)
    print(
        "\n  group           pick                                          regret  plain  place  Spearman  best"
    )
    for r in results:
        print(
            f"  {r['model'] + '@' + str(r['ranks']):14}  {r['pick'][:44]:44} {100 * r['regret']:6.1f}% {100 * r['plain']:5.1f}% "
            f"{r['place']:3} of {r['configurations']:2}  {r['spearman']:6.2f}  {r['best']}"
        )
    print(
        f"\nmedian regret {100 * regret:.1f}% (at most {100 * REGRET:.0f}%); in the worse half: {', '.join(worse) or 'none'}; "
        f"Spearman over all {len(pairs)} runs {entries:.3f} (at least {CORRELATION}), median within a model {inner:.3f}; "
        f"{failed} failed"
    )
    return regret <= REGRET and not worse and entries >= CORRELATION
