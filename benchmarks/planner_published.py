"""What the planner predicts of configurations that others have published (published_rows.py), and Alpa's plans.

    python benchmarks/planner_published.py [--only qwen] [--json published.json] [--page]

--page writes the figures into docs/planner-published.md (published_page.py).

Constants are those of the profiles, each with its source there. Goals, for each table: mean absolute error of the throughput at
most 10%, rank correlation at least 0.9, every row that ran fits and every row that ran out of memory does not. Alpa: what the
planner picks by itself is predicted at least as fast as the plan that Alpa found. Exit code 4 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fused_saving import OneRank, saved_by_fusion
from published_page import ERROR, ORDER, judged, write
from published_rows import TABLES, Row, Scores, Table, gpt
from their_program import Group, TheirProgram, gradient_seconds, message_seconds
from torch import nn

import meshwright as mw
from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.model.precision import DTYPES
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
    # stages that fit, where there are some
    limit = None if row.plan["pp"] > 1 and row.activations is None else 2**41
    plan: Any = mw.plan(
        model, tokens(row.rows, row.length), cluster=cluster, world_size=row.gpus, precision=table.precision,
        memory_limit=limit, **row.plan,
    )  # fmt: skip
    planned, seconds, split = time.process_time() - begin, step(plan), plan.predicted.split
    seconds -= (1 - row.bubble) * split.bubble_seconds
    # the optimizer and the sums of gradients come once
    once = split.optimizer_seconds + split.exposed.get("dp", 0.0)
    if row.update_traffic:
        parameters = plan.predicted.memory_bytes["gradients"] / 4
        once += row.update_traffic * parameters / cluster.streams
    seconds += once / row.accumulated - split.optimizer_seconds - split.exposed.get("dp", 0.0)
    # a rank of a pipeline waits in proportion to what the others compute
    waiting = 1 + row.bubble * split.bubble_seconds / plan.predicted.compute_seconds
    seconds += their_seconds(row, model, cluster, DTYPES[table.precision]) * waiting
    seconds += gradient_seconds(row, plan, cluster) / row.accumulated if row.half_gradients else 0.0
    seconds += message_seconds(row, plan, cluster) * waiting if row.scattered else 0.0
    held = held_bytes(row, plan.predicted)
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


def held_bytes(row: Row, predicted: Any) -> float:
    """Bytes of a rank at its peak: those of the plan, where the program of the row does not keep others."""
    memory = dict(predicted.memory_bytes)
    # the loss is not held during the optimizer's step
    held = predicted.total_bytes + row.loss_bytes * bool(memory["activations"])
    if row.activations is not None:
        held += row.activations - memory["activations"]
    if row.divided_gradients:
        # of the whole ones, those of one of the rank's layers
        held += memory["gradients"] * (1 / row.plan["dp"] + 1 / row.layers - 1)
    return float(held)


def their_seconds(row: Row, model: nn.Module, cluster: Cluster, dtype: torch.dtype) -> float:
    """Seconds that the program of a row spends beyond the plan, by what its source says of it; negative where it fuses."""
    if not (row.compiled or row.to_the_end or row.gathered or row.loss_traffic or row.scores):
        return 0.0
    degree = row.plan["tp"]
    local = Batch.of(tokens(row.rows // row.plan["dp"], row.length))
    rank = OneRank.of(model, local, cluster, dtype)
    group = Group(cluster.running(row.gpus).link(1, degree), degree, row.plan.get("sequence_parallel", False))
    program = TheirProgram(rank, model, row.plan.get("recompute"), group)
    seconds = -saved_by_fusion(rank) / degree if row.compiled else 0.0
    if row.to_the_end:
        seconds += program.ends() / row.plan["pp"]
    if row.gathered:
        seconds += program.undivided(row.gathered)
    if row.loss_traffic:
        # on the last stage, which takes longest
        seconds += program.loss(row.loss_traffic)
    if row.scores:
        seconds += (
            program.scores(row.length)[1] / row.plan["pp"] * (longer(row.scores, cluster.name, dtype) - 1)
        )
    return seconds


@cache
def longer(scores: Scores, device: str, dtype: torch.dtype) -> float:
    """How many times as long as predicted a measured layer took for its scores. Backward passes are taken to differ alike."""
    model, cluster = scores.model(), named(device)
    rank = OneRank.of(model, Batch.of(tokens(scores.rows, scores.length)), cluster, dtype)
    program = TheirProgram(rank, model, None, Group(cluster.link(1, scores.tp), scores.tp, False))
    return scores.seconds / program.scores(scores.length)[0]


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
    mean, order, right = judged(rows)
    print(
        f"  mean absolute error {100 * mean:.1f}% (goal {100 * ERROR:.0f}%), rank correlation {order:.2f} (goal {ORDER}), "
        f"memory right in {right} of {len(rows)} rows", flush=True,
    )  # fmt: skip
    return rows, mean <= ERROR and order >= ORDER and right == len(rows)


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
    parser.add_argument("--page", action="store_true", help="write the figures into the page")
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
    if options.page:
        write(results)
    return 0 if holds else 4


if __name__ == "__main__":
    sys.exit(main())
