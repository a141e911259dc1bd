"""A long run of `mw.elastic` with checkpoints in the background: what each rank holds as it goes on."""

from __future__ import annotations

import gc
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan

LAYOUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"dp2 x tp2": MappingProxyType({"dp": 2, "tp": 2}), "pp2": MappingProxyType({"pp": 2, "dp": 1, "tp": 1})}
)


@dataclass(frozen=True)
class Held:
    """What a rank holds after a step: private bytes of memory, open files, threads, tensors that Python knows."""

    step: int
    memory: int
    handles: int
    threads: int
    tensors: int


def model_and_rows() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A small Llama with dropout, and rows of tokens; the same in every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, attention_dropout=0.1, **sizes))  # type: ignore[arg-type]
    return model, [{"input_ids": ids, "labels": ids} for ids in torch.randint(5, 128, (64, 12))]


def train(rank: int, world_size: int, plan: str, folder: Path, steps: int, interval: int) -> list[Held]:
    """Train for so many steps; what this rank holds after each `interval` of them."""
    model, rows = model_and_rows()
    loader = DataLoader(rows, batch_size=4, shuffle=True)  # type: ignore[arg-type, var-annotated]
    mw.parallelize(model, ParallelPlan.from_json(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = mw.elastic(folder, model=model, optimizer=optimizer, interval=interval)
    held = []
    for step, batch in run.batches(loader, steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % interval == 0:
            held.append(_held_after(step + 1))
    return held


def _held_after(step: int) -> Held:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    # pages that other processes do not have: shared ones come and go with the page cache
    private = sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private"))
    handles, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return Held(step, private, handles, threads, tensors)


def growth(held: Sequence[Held], what: str) -> float:
    """Growth over the last half, relative: of its last quarter over its first, medians, for in some a save is under way."""
    values = [getattr(each, what) for each in held[len(held) // 2 :]]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) / statistics.median(values[:quarter]) - 1


def table(ranks: Sequence[Sequence[Held]]) -> Iterator[str]:
    """A line a rank: half-way and in the end, and the growth over the last half."""
    for rank, held in enumerate(ranks):
        half, last = held[len(held) // 2], held[-1]
        cells = [
            f"{what} {getattr(half, what):,} to {getattr(last, what):,} ({growth(held, what):+.2%})"
            for what in ("memory", "handles", "threads", "tensors")
        ]
        yield f"rank {rank}: {', '.join(cells)}"


def run_layout(pool: Any, layout: str, folder: Path, steps: int, interval: int) -> list[list[Held]]:
    """`train` on real ranks."""
    model, rows = model_and_rows()
    batch = torch.utils.data.default_collate(rows[:4])
    size = math.prod(LAYOUTS[layout].values())
    plan = mw.plan(model, batch, world_size=size, cluster="laptop-cpu", **LAYOUTS[layout])
    assert isinstance(plan, ParallelPlan)
    ranks: list[list[Held]] = pool.run(size, train, plan.to_json(), folder, steps, interval, timeout=7200)
    return ranks
