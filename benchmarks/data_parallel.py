"""Data parallelism against torch's own: step time and peak memory of a GPT-2 of 20 million parameters, on real ranks.

    python benchmarks/data_parallel.py [--ranks 2] [--rounds 5]

The contestants take turns, one step each, and the medians are compared: on a shared machine only ratios mean anything.
Memory is the anonymous memory of rank 0 at its highest during a step of that contestant alone, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing import RankPool

ROWS, LENGTH = 8, 128
# name -> the contestant of torch that does the same
PAIRS = {"dp": "ddp", "zero1": "fsdp-keep", "zero2": "fsdp-keep", "zero3": "fsdp"}


def model_of() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8192, n_embd=384, n_layer=10, n_head=6, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    config.use_cache = False
    return GPT2LMHeadModel(config)


def contestant(name: str, ranks: int) -> Callable[[], None]:
    """One training step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from meshwright_parallel import parallelize

    model: Any = model_of()
    ids = torch.randint(0, 8192, (ROWS * ranks, LENGTH), generator=torch.Generator().manual_seed(1))
    if name.startswith(("dp", "zero")):
        axis, stage = ("dp", None) if name == "dp" else ("zero", {"stage": int(name[-1])})
        model = parallelize(model, ParallelPlan(world_size=ranks, degrees={axis: ranks}, zero=stage))
    else:
        ids = ids.chunk(ranks)[dist.get_rank()]
        if name == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            mesh = init_device_mesh("cpu", (ranks,))
            for block in model.transformer.h:
                fully_shard(block, mesh=mesh, reshard_after_forward=name == "fsdp")
            fully_shard(model, mesh=mesh, reshard_after_forward=name == "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(rank: int, ranks: int, rounds: int, names: list[str]) -> dict[str, list[float]]:
    """Seconds of each contestant's steps, in turn."""
    steps = {name: contestant(name, ranks) for name in names}
    for step in steps.values():
        step(), step()
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            found[name].append(time.perf_counter() - start)
    return found


def resident() -> int:
    """Highest resident memory since `reset_peak`, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))) * 1024


def peak(rank: int, ranks: int, name: str) -> int:
    """Bytes that a steady step takes at most above what the process had before there was a model."""
    now = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    step = contestant(name, ranks)
    for _ in range(2):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    step()
    return resident() - now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--memory", action="store_true", help="measure memory too, one process group for each"
    )
    arguments = parser.parse_args()
    names = [*PAIRS, "ddp", "fsdp", "fsdp-keep"]
    with RankPool() as pool:
        found = pool.run(arguments.ranks, times, arguments.rounds, names, timeout=3000)[0]
    medians = {name: statistics.median(values) for name, values in found.items()}
    memory: dict[str, int] = {}
    if arguments.memory:
        for name in names:
            with RankPool() as pool:
                memory[name] = pool.run(arguments.ranks, peak, name, timeout=600)[0]
    for ours, theirs in PAIRS.items():
        line = f"{ours:6s} {1e3 * medians[ours]:7.0f} ms, {medians[ours] / medians[theirs]:.2f} x {theirs}"
        if memory:
            line += f"; memory {memory[ours] / 2**20:.0f} MiB, {memory[ours] / memory[theirs]:.2f} x"
        print(line)
    json.dump({"seconds": medians, "bytes": memory}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
