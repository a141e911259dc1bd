"""Any layout to any other, on disk and live: `python integration_tests/any_to_any.py [llama|mixtral] [disk|live] [--only a,b]`.

Twelve layouts over 1, 2, 4 and 8 ranks of a Llama-like model with fused projections (Phi-3) and twelve of Mixtral. All start
from the state after one step on one device. On disk: saved in each, loaded in each. Live: one walk along all ordered pairs, the
world growing and shrinking. For every pair all of the model and AdamW's states are equal bit for bit, and three further steps
have the losses of the uninterrupted run on one device.

Prints a line a pair; the exit code is the number of pairs that do not hold, at most 100.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.stored.permuted import is_permuted
from meshwright_dtensor.testing.rank_pool import RankPool

STEPS = 3
TOLERANCE = 1e-5
Pins = dict[str, Any]
COMMON: dict[str, tuple[int, Pins]] = {
    "one": (1, {}),
    "tp2": (2, {"dp": 1, "tp": 2}),
    "dp2": (2, {"dp": 2, "tp": 1}),
    "zero1": (2, {"zero": 1, "dp": 2, "tp": 1}),
    "pp2": (2, {"pp": 2, "tp": 1}),
    "zero2-tp2": (4, {"zero": 2, "dp": 2, "tp": 2}),
    "zero3": (8, {"zero": 3, "dp": 8, "tp": 1}),
    "pp2-dp2-tp2": (8, {"pp": 2, "dp": 2, "tp": 2}),
}
LAYOUTS: Mapping[str, dict[str, tuple[int, Pins]]] = {
    "llama": {
        **COMMON,
        "sp4": (4, {"dp": 1, "tp": 4, "sequence_parallel": True}),
        "cp2-dp2": (4, {"cp": 2, "dp": 2, "tp": 1}),
        "zero3-cp2-tp2": (8, {"zero": 3, "dp": 2, "cp": 2, "tp": 2}),
        "dp2-sp4": (8, {"dp": 2, "tp": 4, "sequence_parallel": True}),
    },
    "mixtral": {
        **COMMON,
        "sp2": (2, {"dp": 1, "tp": 2, "sequence_parallel": True}),
        "ep2-tp2": (4, {"dp": 1, "ep": 2, "tp": 2}),
        "ep4": (4, {"dp": 1, "ep": 4, "tp": 1}),
        "dp2-ep2-tp2": (8, {"dp": 2, "ep": 2, "tp": 2}),
    },
}


def make(name: str) -> Any:
    import transformers as tf

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if name == "llama":
        return tf.Phi3ForCausalLM(tf.Phi3Config(**sizes))
    return tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 128, (8, 16), generator=torch.Generator().manual_seed(11))
    return {"input_ids": ids, "labels": ids}


def built(name: str, plan: ParallelPlan | None, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = make(name)
    if plan is not None:
        mw.parallelize(model, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def digests(model: Any, optimizer: Any) -> dict[str, str]:
    """Name -> digest of the whole value, of all that this rank's stage holds, and options of the optimizer."""

    def digest(x: Any) -> str:
        x = x.full_tensor() if isinstance(x, DTensor) else x
        return hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()

    digest_of = {name: digest(x) for name, x in model.state_dict(keep_vars=True).items()}
    for name, p in model.named_parameters():
        digest_of.update({f"{name}/{key}": digest(x) for key, x in optimizer.state[p].items()})
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    return {**digest_of, "options": str(sorted(group.items()))}


def wrong(model: Any, optimizer: Any, want: tuple[dict[str, str], list[float]]) -> str:
    """What is not as it should be after a load or a reshard, empty if all is."""
    results = digests(model, optimizer)
    everything, losses = want
    if any(everything.get(name) != digest for name, digest in results.items()):
        return "values differ: " + ", ".join(n for n, d in results.items() if everything.get(n) != d)[:200]
    if stages_of(model) is None and results.keys() != everything.keys():
        return f"{len(everything) - len(results)} tensors are missing"
    apart = max(abs(a - b) / abs(b) for a, b in zip(trained(model, optimizer, STEPS), losses, strict=True))
    return "" if apart <= TOLERANCE else f"losses are {apart:.1e} apart"


def start(rank: int, size: int, name: str, path: str) -> tuple[dict[str, str], list[float]]:
    model, optimizer = built(name, None, 0)
    trained(model, optimizer, 1)
    mw.save(path, model=model, optimizer=optimizer, asynchronous=False)
    return digests(model, optimizer), trained(model, optimizer, STEPS)


def saves(rank: int, size: int, name: str, plan: ParallelPlan, source: str, path: str) -> bool:
    """Whether this rank holds parameters in runs."""
    model, optimizer = built(name, plan, 1)
    mw.load(source, model=model, optimizer=optimizer)
    mw.save(path, model=model, optimizer=optimizer, asynchronous=False)
    return any(
        isinstance(p, MeshParameter) and is_permuted(p.global_layout.states) for p in model.parameters()
    )


def loads(
    rank: int, size: int, name: str, plan: ParallelPlan, paths: dict[str, str], want: Any
) -> dict[str, str]:
    model, optimizer = built(name, plan, 2)
    results = {}
    for source, path in paths.items():
        mw.load(path, model=model, optimizer=optimizer)
        results[source] = wrong(model, optimizer, want)
    return results


def world(rank: int, size: int, path: Path) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=FileStore(str(path), size), rank=rank, world_size=size)


def walks(
    rank: int,
    ranks: int,
    name: str,
    walk: list[tuple[str, ParallelPlan]],
    folder: Path,
    source: str,
    want: Any,
) -> list[tuple[str, str, float]]:
    """Along the walk: (pair, what is wrong, seconds of the reshard)."""
    dist.destroy_process_group()
    model: Any = None
    optimizer: Any = None
    results = []
    size = walk[0][1].world_size
    if rank < size:
        world(rank, size, folder / "start")
        model, optimizer = built(name, walk[0][1], 0)
        mw.load(source, model=model, optimizer=optimizer)
    for number, ((here, _), (there, plan)) in enumerate(pairwise(walk)):
        before, size = size, plan.world_size
        if rank >= max(before, size):
            continue
        if size > before:
            world(rank, size, folder / f"{number}")
            if rank >= before:
                model, optimizer = built(name, None, 3)
        start = time.monotonic()
        mw.reshard(model, optimizer, plan)
        took = time.monotonic() - start
        if rank >= size:
            model = optimizer = None
            dist.destroy_process_group()
            continue
        results.append((f"{here} -> {there}", wrong(model, optimizer, want), took))
        mw.load(source, model=model, optimizer=optimizer)
    return results


def tour(names: list[str]) -> list[str]:
    """A walk that takes every ordered pair once (Hierholzer)."""
    left = {a: [b for b in names if b != a] for a in names}
    stack, done = [names[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            done.append(stack.pop())
    return done[::-1]


def planned(name: str, layouts: dict[str, tuple[int, Pins]]) -> dict[str, ParallelPlan]:
    results = {}
    for key, (size, pins) in layouts.items():
        plan = mw.plan(make(name), batch(), world_size=size, cluster="laptop-cpu", **pins)
        assert isinstance(plan, ParallelPlan)
        results[key] = plan
    return results


def check(name: str, modes: list[str], only: list[str] | None, pool: RankPool, folder: Path) -> int:
    """How many pairs do not hold."""
    layouts = {k: v for k, v in LAYOUTS[name].items() if only is None or k in only}
    plans = planned(name, layouts)
    source = str(folder / f"{name}-start")
    want = pool.run(1, start, name, source)[0]
    bad = pairs = 0

    def tell(mode: str, pair: str, problems: list[str], more: str = "") -> None:
        nonlocal bad, pairs
        problem = next((p for p in problems if p), "")
        pairs += 1
        bad += bool(problem)
        print(f"{name} {mode} {pair}: {problem or 'equal'}{more}", flush=True)

    if "disk" in modes:
        paths = {key: str(folder / f"{name}-{key}") for key in plans}
        for key, plan in plans.items():
            runs = pool.run(plan.world_size, saves, name, plan, source, paths[key], timeout=1200)
            print(f"{name} saved in {key}{', which has runs' * any(runs)}", flush=True)
        for key, plan in plans.items():
            results = pool.run(plan.world_size, loads, name, plan, paths, want, timeout=3600)
            for origin in paths:
                if origin != key:
                    tell("disk", f"{origin} -> {key}", [result[origin] for result in results])
    if "live" in modes:
        walk = [(key, plans[key]) for key in tour(list(plans))]
        ranks = max(plan.world_size for plan in plans.values())
        live = folder / f"{name}-live"
        live.mkdir()
        told: dict[str, list[tuple[str, float]]] = {}
        for result in pool.run(ranks, walks, name, walk, live, source, want, timeout=7200):
            for pair, problem, took in result:
                told.setdefault(pair, []).append((problem, took))
        for pair, all_ in told.items():
            tell("live", pair, [p for p, _ in all_], f" ({max(t for _, t in all_):.2f} s)")
    print(f"{name}: {pairs} pairs, {bad} do not hold", flush=True)
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", help="llama, mixtral, disk, live; all of them by default")
    parser.add_argument("--only", help="layouts, separated by commas")
    options = parser.parse_args()
    names = [x for x in LAYOUTS if x in options.what] or list(LAYOUTS)
    modes = [x for x in ("disk", "live") if x in options.what] or ["disk", "live"]
    only = None if options.only is None else options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        bad = 0
        for name in names:
            for mode in modes:  # a walk leaves ranks without a world: each has ranks of its own
                with RankPool() as pool:
                    here = Path(folder) / mode
                    here.mkdir(exist_ok=True)
                    bad += check(name, [mode], only, pool, here)
    sys.exit(min(bad, 100))


if __name__ == "__main__":
    main()
