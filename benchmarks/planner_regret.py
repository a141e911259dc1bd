"""Does the planner pick the winner?  Every legal configuration of small models, predicted and then run on this machine.

    meshwright calibrate --output machine.json
    python benchmarks/planner_regret.py --cluster machine.json --json regret.json [--ranks 2,4] [--models deep,wide] [--minutes 20]
    python benchmarks/planner_regret.py --cluster machine.json --measured regret.json      # predict anew, run nothing

For each model and world size: every combination of degrees, ZeRO stages, sequence parallelism and microbatches that the
planner accepts is pinned and predicted; each is run for real; the planner is then asked without pins.  Configurations take
turns in rounds, so that all see the same noise; further rounds are of the pick and of those that lead, since the least of
many noisy times is too short.  A configuration counts with the median of its turns, a turn with the median of its steps.

Printed: regret (time of the pick over the best measured, less one), place of the pick, Spearman's correlation of predicted
and measured, and the noise (how far turns of one configuration lie apart); over all models the median regret.  Exit code 4
when a pick is in the worse half, the median regret is above 5%, or the correlation over all runs is below 0.9.  Groups that
the file of `--json` holds already are not run again, so what was broken off can be taken up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.testing import RankError, RankPool

ROWS = 8
REGRET, CORRELATION = 0.05, 0.9
"""What acceptance asks for: the median regret at most, the correlation at least."""
WARM, LEAST = 2, 3
"""Steps of a turn that do not count, and fewest that do."""
FINALS, LEADERS, MOST_FINALS = 0.35, 5, 6
"""Part of the time that is kept for further rounds, how many of the fastest take part, and how many rounds at most."""


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model of that shape, and a batch."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    def llama(vocab: int, hidden: int, layers: int, inner: int) -> nn.Module:
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    torch.manual_seed(0)
    length = {"long": 512, "vocabulary": 64}.get(name, 128)
    vocab = {"vocabulary": 16384}.get(name, 512)
    if name == "deep":
        model = llama(vocab, 64, 12, 192)
    elif name == "wide":
        model = llama(vocab, 512, 2, 1536)
    elif name == "long":
        model = llama(vocab, 64, 3, 192)
    elif name == "vocabulary":
        model = llama(vocab, 128, 2, 384)
    elif name == "moe":
        moe = MixtralConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
            head_dim=32, max_position_embeddings=512, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = MixtralForCausalLM(moe)
    elif name == "gpt2":
        config = GPT2Config(
            vocab_size=vocab, n_embd=128, n_layer=4, n_head=4, n_positions=length, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    else:
        raise SystemExit(f"--models {name}: known are {', '.join(MODELS)}")
    ids = torch.randint(1, vocab, (ROWS, length), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}


MODELS = ("deep", "wide", "moe", "long", "vocabulary", "gpt2")


@dataclass
class Run:
    """A configuration: its plan, and the seconds that its turns took for a step (each the median of the turn's steps)."""

    name: str
    plan: ParallelPlan
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
        return statistics.median(self.turns)

    @property
    def noise(self) -> float:
        """How far its turns lie apart, as a part of their median."""
        return (max(self.turns) - min(self.turns)) / self.measured

    def record(self) -> dict[str, Any]:
        """For the file."""
        split = self.prediction.split
        parts = {"compute": self.prediction.compute_seconds}
        if split is not None:
            parts |= {"bubble": split.bubble_seconds, "optimizer": split.optimizer_seconds, **split.exposed}
        return {"name": self.name, "predicted": self.predicted, "parts": parts, "turns": self.turns}


def pins(ranks: int) -> Iterator[dict[str, Any]]:
    """Every way to pin what the planner searches, legal or not."""
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
                for count in (2, 4, 8) if pp > 1 else (None,):
                    found = {**base, "zero": stage, "zero_degree": shard, "sequence_parallel": sequence}
                    found["microbatches"] = count
                    yield {key: value for key, value in found.items() if value is not None}


def configurations(name: str, ranks: int, cluster: str) -> list[Run]:
    """Every legal one, with what is predicted of it."""
    with mw.deferred_init():
        model, batch = build(name)
    found: dict[str, Run] = {}
    for chosen in pins(ranks):
        try:
            plan = mw.plan(model, batch, world_size=ranks, cluster=cluster, planner="manual", **chosen)
        except MeshwrightError:
            continue
        assert isinstance(plan, ParallelPlan)
        found.setdefault(identity(plan), Run(" ".join(f"{k}={v}" for k, v in chosen.items()), plan))
    return list(found.values())


def identity(plan: ParallelPlan) -> str:
    """What a plan does, without what is said of it."""
    data = json.loads(plan.to_json())
    for said in ("provenance", "predicted", "collectives"):
        data.pop(said, None)
    return json.dumps(data, sort_keys=True)


def take_turn(rank: int, size: int, name: str, plan: ParallelPlan, steps: int, seconds: float) -> list[float]:
    """Some steps of one configuration: seconds of each, as the slowest rank has it."""
    torch.manual_seed(0)
    model, batch = build(name)
    model = mw.parallelize(model, plan, batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times: list[float] = []
    begin = time.perf_counter()
    for number in range(WARM + steps):
        dist.barrier()
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if number >= WARM:
            times.append(time.perf_counter() - start)
        late = torch.tensor(float(time.perf_counter() - begin > seconds and len(times) >= LEAST))
        dist.broadcast(late, 0)
        if late:
            break
    return times


def measure(
    runs: list[Run], pick: Run, name: str, ranks: int, pool: RankPool, until: float, rounds: int
) -> None:
    """`rounds` turns of each, then turns of the pick and of those that lead, until the time is over."""
    begin = time.monotonic()

    def turn(run: Run, seconds: float) -> None:
        try:
            run.turns.append(
                statistics.median(pool.run(ranks, take_turn, name, run.plan, 10, seconds, timeout=120.0)[0])
            )
        except (MeshwrightError, RankError, RuntimeError) as error:
            run.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            print(f"   FAILED {run.name}: {run.failed}", flush=True)

    every = (until - begin) * (1 - FINALS)
    for number in range(rounds):
        for place, run in enumerate(runs if number % 2 == 0 else runs[::-1]):
            left = begin + every - time.monotonic()
            if run.failed or (left <= 0 and run.turns):
                continue
            # what is left over the turns that are left, half of it for setting up
            turn(run, max(0.3, left / (len(runs) * (rounds - number) - place) / 2))
    number = 0
    while time.monotonic() < until and number < MOST_FINALS:
        number += 1
        done = sorted((r for r in runs if r.turns and not r.failed), key=lambda r: r.measured)
        final = done[:LEADERS] if pick in done[:LEADERS] or pick.failed else [*done[:LEADERS], pick]
        for run in final if number % 2 else final[::-1]:
            if time.monotonic() < until:
                turn(run, 1.0)


def ranks_of(values: list[float]) -> list[float]:
    """Their ranks, equals sharing the mean of theirs."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def spearman(first: list[float], second: list[float]) -> float:
    """Correlation of ranks."""
    if len(first) < 3:
        return math.nan
    return statistics.correlation(ranks_of(first), ranks_of(second))


def race(name: str, ranks: int, cluster: str, measured: Callable[[list[Run], Run], None]) -> dict[str, Any]:
    """One model on so many ranks; `measured` fills in the times of the runs and of the pick among them."""
    begin = time.monotonic()
    runs = configurations(name, ranks, cluster)
    with mw.deferred_init():
        model, batch = build(name)
    pick = mw.plan(model, batch, world_size=ranks, cluster=cluster)
    assert isinstance(pick, ParallelPlan)
    planned = time.monotonic() - begin
    chosen = next((r for r in runs if identity(r.plan) == identity(pick)), None)
    if chosen is None:
        chosen = Run("the pick", pick)
        runs.append(chosen)
    measured(runs, chosen)
    done = sorted((r for r in runs if r.turns), key=lambda r: r.measured)
    best = done[0]
    print(f"\n{name}, {ranks} ranks: {len(done)} configurations (planned in {planned:.0f} s)", flush=True)
    for place, run in enumerate(done, 1):
        mark = "<- the pick" if run is chosen else ""
        print(
            f"  {place:3} {1e3 * run.measured:8.1f} ms measured (turns {len(run.turns)}, apart {100 * run.noise:3.0f}%) "
            f"{1e3 * run.predicted:8.1f} predicted  {run.name} {mark}"
        )
    result = {
        "model": name,
        "ranks": ranks,
        "configurations": len(done),
        "failed": [f"{r.name}: {r.failed}" for r in runs if r.failed],
        "pick": chosen.name,
        "regret": chosen.measured / best.measured - 1 if chosen.turns else math.inf,
        "place": done.index(chosen) + 1 if chosen in done else len(runs),
        "spearman": spearman([r.predicted for r in done], [r.measured for r in done]),
        "noise": statistics.median(r.noise for r in done),
        "runs": [r.record() for r in done],
    }
    apart = chosen.turns and min(chosen.turns) <= max(best.turns) and chosen is not best
    print(
        f"  regret {100 * result['regret']:.1f}%, place {result['place']}, Spearman {result['spearman']:.3f}; turns of one "
        f"configuration lie {100 * result['noise']:.0f}% apart (median)"
        + ("; the turns of the pick and of the best overlap" if apart else "")
    )
    return result


def known(found: dict[str, Any]) -> Callable[[list[Run], Run], None]:
    """Times that were measured before, by the names of runs."""
    times = {run["name"]: run["turns"] for run in found["runs"]}

    def fill(runs: list[Run], pick: Run) -> None:
        for run in runs:
            run.turns = list(times.get(run.name, ()))

    return fill


def verdict(results: list[dict[str, Any]]) -> bool:
    """Print the sums, and whether acceptance holds."""
    by_model: dict[str, list[float]] = {}
    for result in results:
        by_model.setdefault(result["model"], []).append(result["regret"])
    regret = statistics.median(statistics.mean(values) for values in by_model.values())
    worse = [f"{r['model']}@{r['ranks']}" for r in results if r["place"] > math.ceil(r["configurations"] / 2)]
    pairs = [(run["predicted"], statistics.median(run["turns"])) for r in results for run in r["runs"]]
    every = spearman([p for p, _ in pairs], [m for _, m in pairs])
    inner = statistics.median(r["spearman"] for r in results)
    failed = sum(len(r["failed"]) for r in results)
    print(
        f"\nmedian regret {100 * regret:.1f}% (at most {100 * REGRET:.0f}%); in the worse half: {', '.join(worse) or 'none'}; "
        f"Spearman over all {len(pairs)} runs {every:.3f} (at least {CORRELATION}), median within a model {inner:.3f}; "
        f"{failed} failed"
    )
    return regret <= REGRET and not worse and every >= CORRELATION


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", required=True, help="file that `meshwright calibrate` wrote")
    parser.add_argument("--models", default="deep,wide,moe,long,vocabulary")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of it")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each configuration")
    parser.add_argument(
        "--json", type=Path, default=None, help="write the results here; groups in it are kept"
    )
    parser.add_argument("--measured", type=Path, default=None, help="results to take the times from")
    options = parser.parse_args()
    groups = list(itertools.product(options.models.split(","), map(int, options.ranks.split(","))))
    end = time.monotonic() + 60 * options.minutes
    results: list[dict[str, Any]] = []
    if options.measured is not None:
        for found in json.loads(options.measured.read_text()):
            if (found["model"], found["ranks"]) in groups:
                results.append(race(found["model"], found["ranks"], options.cluster, known(found)))
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))
        return 0 if verdict(results) else 4
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
        before = {(r["model"], r["ranks"]) for r in results}
        groups = [group for group in groups if group not in before]
    with RankPool() as pool:
        for number, (name, ranks) in enumerate(groups):
            # as many seconds for each rank that runs
            weight = ranks**2 / sum(r**2 for _, r in groups[number:])
            until = time.monotonic() + (end - time.monotonic()) * weight

            def run_all(runs: list[Run], pick: Run, n: str = name, r: int = ranks, u: float = until) -> None:
                measure(runs, pick, n, r, pool, u, options.rounds)

            results.append(race(name, ranks, options.cluster, run_all))
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))
    return 0 if verdict(results) else 4


if __name__ == "__main__":
    sys.exit(main())
