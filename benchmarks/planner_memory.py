"""Predicted memory compared with measured memory: bytes of live tensors, counted on real ranks.

    python benchmarks/planner_memory.py [--only dp,tp] [--json memory.json]

Ten pairs of a model and a plan; each is trained for a few steps, and the peak of the third counts, on the rank that holds
most.  Exit code 4 where a prediction is off by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from small_models import Batch, gpt2, llama, mixtral, tokens
from torch import nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "packages" / "planner" / "tests"))
from counting import Counting

ERROR = 0.05
ROWS, LENGTH, VOCABULARY = 8, 64, 512

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("llama", 1, {}),
    "dp": ("llama", 2, {"dp": 2, "zero": 0}),
    "zero1": ("llama", 2, {"dp": 2, "zero": 1}),
    "zero2": ("gpt2", 2, {"dp": 2, "zero": 2}),
    "zero3": ("llama", 2, {"dp": 2, "zero": 3}),
    "tp": ("llama", 2, {"tp": 2, "dp": 1, "sequence_parallel": False}),
    "sp": ("llama", 2, {"tp": 2, "dp": 1, "sequence_parallel": True}),
    "ep": ("moe", 2, {"ep": 2, "dp": 1}),
    "recompute": ("llama", 2, {"dp": 2, "zero": 0, "recompute": "full"}),
    "pp": ("llama", 2, {"pp": 2, "dp": 1, "microbatches": 4}),
    "bf16": ("llama", 2, {"dp": 2, "zero": 0, "precision": "bf16"}),
    "cp": ("llama", 2, {"cp": 2, "dp": 1}),
    "ep+zero2": ("moe", 4, {"ep": 2, "dp": 2, "zero": 2}),
    "ep+zero3": ("moe", 4, {"ep": 2, "dp": 2, "zero": 3}),
    "tp+zero3": ("llama", 4, {"tp": 2, "dp": 2, "zero": 3}),
    "pp+zero2": ("gpt2", 4, {"pp": 2, "dp": 2, "zero": 2, "microbatches": 2}),
}


def build(name: str) -> tuple[nn.Module, Batch]:
    """A small model and its batch."""
    if name == "llama":
        model = llama(VOCABULARY, 128, 4, 384, 256)
    elif name == "moe":
        model = mixtral(VOCABULARY, 128, 4, 384, 256)
    else:
        model = gpt2(VOCABULARY, 128, 4, 256)
    return model, tokens(VOCABULARY, ROWS, LENGTH)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The local tensors that a rank has between steps."""
    states = (x for entries in optimizer.state.values() for x in entries.values())
    for tensor in (*model.parameters(), *model.buffers(), *states):
        if isinstance(tensor, torch.Tensor):
            local = getattr(tensor, "_local_tensor", tensor)
            yield local.detach()


def peak(rank: int, size: int, name: str, plan: ParallelPlan) -> int:
    """Most bytes of tensors at once on this rank, in the third step."""
    model, batch = build(name)
    model = mw.parallelize(model, plan, batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with Counting(held(model, optimizer)) as counting:
        for _ in range(2):
            counting.restart()
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return counting.peak


def compare(pool: RankPool, case: str) -> dict[str, Any]:
    """One pair: what was predicted, and what was counted."""
    name, ranks, pins = CASES[case]
    with mw.deferred_init():
        model, batch = build(name)
    plan = mw.plan(model, batch, world_size=ranks, cluster="laptop-cpu", planner="manual", **pins)
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    counted = max(pool.run(ranks, peak, name, plan))
    predicted = plan.predicted.total_bytes
    parts = {part: size for part, size in plan.predicted.memory_bytes.items() if part != "total"}
    return {
        "case": case, "model": name, "predicted": predicted, "counted": counted,
        "error": predicted / counted - 1, "parts": parts,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    options = parser.parse_args()
    rows = []
    with RankPool() as pool:
        for case in options.only.split(","):
            row = compare(pool, case)
            rows.append(row)
            print(
                f"{case:10} {row['model']:6} predicted {row['predicted'] / 2**20:7.2f} MiB, counted "
                f"{row['counted'] / 2**20:7.2f} ({100 * row['error']:+.1f}%)  "
                + ", ".join(f"{p} {s / 2**20:.2f}" for p, s in row["parts"].items() if s),
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    worst = max(abs(row["error"]) for row in rows)
    within = sum(abs(row["error"]) <= ERROR for row in rows)
    print(f"{within} of {len(rows)} within {100 * ERROR:.0f}%, worst {100 * worst:.1f}%")
    return 0 if worst <= ERROR else 4


if __name__ == "__main__":
    sys.exit(main())
