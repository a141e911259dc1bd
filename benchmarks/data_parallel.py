"""Data and tensor parallelism against torch's own, written by hand: step time and peak memory, on real ranks.

    python benchmarks/data_parallel.py [--model gpt2|llama] [--ranks 2] [--rounds 5] [--memory] [--only dp,zero3]

Ours and torch's take turns, one step each, in the same processes; what is printed is the median of the ratios of such
pairs of steps, with the least and the largest. Memory is the resident memory of a rank at its highest during a step of one
of them alone, in processes of its own, above what the process had before there was a model: the mean over ranks, and the
median of MEMORY_RUNS runs, since what the C library keeps differs by several percent from rank to rank and run to run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peak_memory import peak_of_step
from taking_turns import timed_pairs
from torch import nn

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, LENGTH, VOCABULARY = 8, 128, 8192
MEMORY_RUNS = 3
PAIRS = {
    "dp": "ddp",
    "zero1": "fully_shard, no reshard",
    "zero2": "fully_shard, no reshard",
    "zero3": "fully_shard",
    "tp": "parallelize_module",
    "zero3 x tp2": "parallelize_module + fully_shard",
}
"""Ours, and what of torch does the same."""


def model_of(name: str) -> nn.Module:
    """About 20 million parameters, no dropout (torch's ranks would draw other numbers than ours)."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=384, n_layer=10, n_head=6, n_positions=LENGTH,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tensor_degree(contestant: str, ranks: int) -> int:
    """Over how many ranks a contestant of either side shards its layers."""
    if contestant in ("tp", "parallelize_module"):
        return ranks
    return 2 if "tp2" in contestant or "+" in contestant else 1


def plan_of(contestant: str, model: str, ranks: int) -> ParallelPlan:
    """The plan of ours; made once, on one process."""
    import meshwright as mw

    if contestant == "dp":
        return ParallelPlan(world_size=ranks, degrees={"dp": ranks})
    if contestant.startswith("zero") and "tp" not in contestant:
        return ParallelPlan(world_size=ranks, degrees={"zero": ranks}, zero={"stage": int(contestant[-1])})
    tp = tensor_degree(contestant, ranks)
    options = {"zero": 3} if "zero3" in contestant else {}
    ids = torch.zeros(ROWS * ranks // tp, LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    with torch.device("meta"):
        built = model_of(model)
    return mw.plan(
        built, batch, cluster="laptop-cpu", world_size=ranks, tp=tp, sequence_parallel=False, **options
    )


def by_hand(contestant: str, name: str, model: Any, ranks: int) -> Any:
    """`model` under torch's own engines, as their tutorials write it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    if contestant == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    tp = tensor_degree(contestant, ranks)
    mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    blocks = model.transformer.h if name == "gpt2" else model.model.layers
    if tp > 1:
        columns = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj".split()
        rows = "self_attn.o_proj mlp.down_proj".split()
        for block in blocks:
            styles = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
            parallelize_module(block, mesh["tp"], styles)
    if "fully_shard" in contestant:
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward="no reshard" not in contestant)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward="no reshard" not in contestant)
    return model


def stepper(contestant: str, name: str, ranks: int, plan: ParallelPlan | None) -> Callable[[], None]:
    """One training step, on the same global batch for all."""
    from meshwright_parallel import parallelize

    model: Any = model_of(name)
    replicas = ranks // tensor_degree(contestant, ranks)
    ids = torch.randint(0, VOCABULARY, (ROWS * replicas, LENGTH), generator=torch.Generator().manual_seed(1))
    if plan is not None:
        model = parallelize(model, plan)
    else:
        model = by_hand(contestant, name, model, ranks)
        ids = ids.chunk(replicas)[dist.get_rank() * replicas // ranks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(
    rank: int, ranks: int, rounds: int, name: str, pair: tuple[str, str], plan: ParallelPlan
) -> list[tuple[float, float]]:
    """Seconds of ours and of torch's steps, in turn."""
    steps = [stepper(pair[0], name, ranks, plan), stepper(pair[1], name, ranks, None)]
    for step in steps:
        step(), step()
    return timed_pairs(steps, rounds)


def peak(rank: int, ranks: int, name: str, contestant: str, plan: ParallelPlan | None) -> int:
    """Bytes that a steady step takes at most above what the process had before there was a model."""
    model_of(name)  # what importing takes is nobody's
    return peak_of_step(lambda: stepper(contestant, name, ranks, plan))


def compare(name: str, ranks: int, ours: str, rounds: int, memory_runs: int = 0) -> dict[str, Any]:
    """Seconds of pairs of steps of a contestant of ours and its peer, their ratio, and memory where runs of it are asked for."""
    theirs, plan = PAIRS[ours], plan_of(ours, name, ranks)
    with RankPool() as pool:
        timed = pool.run(ranks, times, rounds, name, (ours, theirs), plan, timeout=1200)[0]
    ratios = sorted(a / b for a, b in timed)
    result: dict[str, Any] = {
        "ours": ours, "theirs": theirs, "model": name, "ranks": ranks, "seconds": timed,
        "ratio": statistics.median(ratios), "least": ratios[0], "largest": ratios[-1],
    }  # fmt: skip
    runs: list[list[float]] = [[], []]
    for _ in range(memory_runs):
        for of, contestant, its_plan in ((runs[0], ours, plan), (runs[1], theirs, None)):
            with RankPool() as pool:
                of.append(statistics.mean(pool.run(ranks, peak, name, contestant, its_plan, timeout=600)))
    if memory_runs:
        result["bytes"] = [statistics.median(of) for of in runs]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="comma-separated contestants of ours")
    parser.add_argument("--memory", action="store_true", help="measure memory too")
    arguments = parser.parse_args()
    ranks, name = arguments.ranks, arguments.model
    wanted = arguments.only.split(",") if arguments.only else list(PAIRS)
    results = []
    for ours in wanted:
        if ("tp" in ours and name == "gpt2") or (" x " in ours and ranks < 4):
            continue  # GPT-2's fused projection has no tensor parallelism in torch
        result = compare(name, ranks, ours, arguments.rounds, MEMORY_RUNS if arguments.memory else 0)
        median = statistics.median(a for a, _ in result["seconds"])
        line = f"{ours:12s} {1e3 * median:7.0f} ms, {result['ratio']:.2f} x {result['theirs']} "
        line += f"({result['least']:.2f} to {result['largest']:.2f})"
        if arguments.memory:
            mine, other = result["bytes"]
            line += f"; {mine / 2**20:.0f} MiB, {mine / other:.2f} x"
        print(line, flush=True)
        results.append(result)
    json.dump({"model": name, "ranks": ranks, "results": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
