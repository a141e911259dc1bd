"""What the planner predicts of configurations that others have published (published_rows.py), and Alpa's plans.

    python benchmarks/planner_published.py [--only qwen] [--json published.json]

Constants are those of the profiles, each with its source there. Goals, for each table: mean absolute error of the throughput at
most 10%, rank correlation at least 0.9, every row that ran fits and every row that ran out of memory does not. Alpa: what the
planner picks by itself is predicted at least as fast as the plan that Alpa found. Exit code 4 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fused_saving import fused_saving
from published_rows import TABLES, Row, Table, gpt

import meshwright as mw
from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.clusters.registry import named
from meshwright_planner.evaluation.context import kept_back
from meshwright_planner.trace.batch import Batch

ALPA = (  # billions of parameters, GPUs, hidden, layers, heads, and the plan found: pp, dp, tp, microbatches
    (1.3, 4, 2048, 24, 32, (2, 2, 1, 128)),
    (6.7, 16, 4096, 32, 32, (2, 2, 4, 64)),
    (15, 32, 5120, 48, 40, (4, 2, 4, 128)),
    (39, 64, 8192, 48, 64, (16, 1, 4, 1024)),
)
ERROR, ORDER = 0.1, 0.9


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def step(plan: Any) -> float:
    """Predicted seconds of a step."""
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    return float(plan.predicted.step_seconds)


def predict(table: Table, row: Row) -> dict[str, Any]:
    """What is predicted of one row: throughput in the unit of its table, GiB, and whether that fits."""
    model, cluster = row.model(), named(table.cluster)
    begin = time.process_time()
    plan: Any = mw.plan(
        model, tokens(row.rows, row.length), cluster=cluster, world_size=row.gpus, precision=table.precision,
        memory_limit=2**41, **row.plan,
    )  # fmt: skip
    planned, seconds, split = time.process_time() - begin, step(plan), plan.predicted.split
    seconds -= (1 - row.bubble) * split.bubble_seconds
    if row.accumulated > 1:
        # the optimizer and the sums of gradients come once
        once = split.optimizer_seconds + split.exposed["dp"]
        seconds -= once * (1 - 1 / row.accumulated)
    if row.late_sums:
        seconds += split.hidden.get("dp", 0.0) / row.accumulated
    if row.compiled:
        local = Batch.of(tokens(row.rows // row.plan["dp"], row.length))
        seconds -= fused_saving(model, local, cluster, torch.bfloat16)
    # the loss is not held during the optimizer's step
    held = plan.predicted.total_bytes + row.loss_bytes * bool(plan.predicted.memory_bytes["activations"])
    work = row.flops / 1e12 if row.flops else row.rows * row.length
    rate = work / seconds / row.gpus
    return {
        "row": row.name,
        "published": row.published,
        "predicted": rate,
        "error": None if row.published is None else rate / row.published - 1,
        "published GiB": row.memory,
        "predicted GiB": held / 2**30,
        "fits": held <= kept_back(cluster.usable_bytes),
        "seconds": seconds,
        "planned in": planned,
    }


def tabled(table: Table) -> tuple[list[dict[str, Any]], bool]:
    """Predict the rows of a table, print them, and compare."""
    print(f"\n{table.source} ({table.cluster}, {table.unit} of a GPU)", flush=True)
    rows = []
    for row in table.rows:
        made = predict(table, row)
        rows.append(made)
        ran = "ran out of memory" if row.published is None else f"published {row.published:g}"
        error = "" if row.published is None else f" ({100 * made['error']:+.1f}%)"
        held = f"{made['predicted GiB']:.1f} GiB" + (
            "" if row.memory is None else f" (published {row.memory})"
        )
        wrong = "" if made["fits"] == (row.published is not None) else ", WRONG"
        fits = f"{'fits' if made['fits'] else 'does not fit'}{wrong}"
        print(f"  {row.name}: {ran}, predicted {made['predicted']:.4g}{error}; {held}, {fits}", flush=True)
    ran_rows = [row for row in rows if row["published"] is not None]
    mean = statistics.mean(abs(row["error"]) for row in ran_rows)
    order = spearman([row["published"] for row in ran_rows], [row["predicted"] for row in ran_rows])
    right = sum(row["fits"] == (row["published"] is not None) for row in rows)
    print(
        f"  mean absolute error {100 * mean:.1f}% (goal {100 * ERROR:.0f}%), rank correlation {order:.2f} (goal {ORDER}), "
        f"memory right in {right} of {len(rows)} rows", flush=True,
    )  # fmt: skip
    return rows, mean <= ERROR and order >= ORDER and right == len(rows)


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; equal values share their mean rank."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]

    return statistics.correlation(ranks(a), ranks(b))


def mesh(plan: Any) -> str:
    """Degrees, microbatches and recomputation of a plan."""
    parts = [f"{axis} {degree}" for axis, degree in plan.degrees.items() if degree > 1]
    if plan.zero is not None:
        parts.append(f"stage {plan.zero.stage}")
    if plan.pipeline is not None:
        parts.append(f"{plan.pipeline.microbatches} microbatches, {plan.pipeline.schedule}")
    return ", ".join([*parts, *sorted({f"recompute {r.policy}" for r in plan.recompute})])


def alpa() -> tuple[list[dict[str, Any]], bool]:
    """Sequences of 1,024, 1,024 to a batch, fp16 on V100s of 16 GB.

    Alpa turns sums of gradients over data ranks into reduce-scatters, so that those share the update (Zheng et al., 2022,
    4.2): its plans are costed with stage 2 of ZeRO.
    """
    plans, holds = [], True
    for billions, ranks, hidden, layers, heads, (pp, dp, tp, count) in ALPA:
        cluster, batch = named("p3.16xlarge"), tokens(1024, 1024)
        model = gpt(hidden, layers, heads)
        common = {"cluster": cluster, "world_size": ranks, "precision": "fp16"}
        begin = time.perf_counter()
        theirs = mw.plan(
            model, batch, **common, pp=pp, dp=dp, tp=tp, cp=1, ep=1, zero=2 if dp > 1 else 0, microbatches=count,
            schedule="1f1b", recompute="full", memory_limit=2**40,
        )  # fmt: skip
        try:
            ours = mw.plan(model, batch, **common)
        except InfeasibleError as error:
            print(f"GPT {billions}B on {ranks}: the planner finds nothing that fits: {error}")
            holds = False
            continue
        fast = step(ours) <= 1.001 * step(theirs)
        holds &= fast
        row = {
            "billions": billions,
            "gpus": ranks,
            "alpa": step(theirs),
            "ours": step(ours),
            "pick": mesh(ours),
        }
        plans.append(row)
        print(
            f"GPT {billions}B on {ranks} V100: Alpa's {mesh(theirs)} ({theirs.predicted.total_bytes / 2**30:.1f} GiB) predicted "
            f"{step(theirs):.1f} s; the planner's {mesh(ours)} ({ours.predicted.total_bytes / 2**30:.1f} GiB) {step(ours):.1f} s"
            f"{'' if fast else ' SLOWER'}; planned in {time.perf_counter() - begin:.0f} s", flush=True,
        )  # fmt: skip
    return plans, holds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[*TABLES, "alpa"], default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    options = parser.parse_args()
    results, holds = {}, True
    for name, table in TABLES.items():
        if options.only in (None, name):
            results[name], good = tabled(table)
            holds &= good
    if options.only in (None, "alpa"):
        results["alpa"], good = alpa()
        holds &= good
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if holds else 4


if __name__ == "__main__":
    sys.exit(main())
