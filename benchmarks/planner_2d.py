"""The automatic plan compared with the best two-dimensional sharding that a person writes: GPT-2, LLaMA-2 and GPT-Neo.

    python benchmarks/planner_2d.py --predict                              # of 2B parameters, as predicted, 8 and 16 ranks
    python benchmarks/planner_2d.py --measure --cluster machine.json       # small ones, run on 4 gloo ranks of this machine

The person's sweep: every mesh of data x tensor ranks; on the data axis replicas, or shared states (ZeRO 1, 2, 3: FSDP); on
the tensor axis Megatron's cut of every weight, with the sequence split or whole between blocks, and the embedding cut by
vocabulary or, as in GSPMD's fully sharded layouts, by features. What a mark does not say (biases, activations) is found by the
same program as everywhere, to the person's advantage. Recomputation is taken up where nothing fits without.

Predicted: exit code 4 where the automatic plan's step is longer than the person's best. Measured: all configurations live in
the same ranks and take a step in turns, so that all see the same noise; the ratio is taken round by round, and its median and
quartiles are printed; exit code 4 where a median is above 1 + NOISE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from taking_turns import living_together
from torch import nn

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

NOISE = 0.03
"""Two runs of one plan differ by so much on a machine that does nothing else."""

MARKS: Mapping[str, Mapping[str, int]] = {
    "gpt2": {"c_fc.weight": 1, "c_proj.weight": 0},  # stored as [in, out]; the fused projection is found
    "llama2": {
        "q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "o_proj.weight": 1, "gate_proj.weight": 0,
        "up_proj.weight": 0, "down_proj.weight": 1, "lm_head.weight": 0,
    },
    "gpt-neo": {
        "q_proj.weight": 0, "k_proj.weight": 0, "v_proj.weight": 0, "out_proj.weight": 1, "c_fc.weight": 0,
        "c_proj.weight": 1,
    },
}  # fmt: skip
"""End of a parameter's name -> the dim that Megatron cuts; embeddings apart."""

EMBEDDINGS = ("wte.weight", "embed_tokens.weight")

Batch = dict[str, torch.Tensor]


def build(name: str, whole: bool) -> tuple[nn.Module, Batch]:
    """The model of 2B parameters, or its small form, and a batch."""
    import transformers as tf

    torch.manual_seed(0)
    layers, hidden, heads = (24, 2560, 32) if whole else (3, 128, 4)
    rows, length, vocabulary = (64, 1024, 50257) if whole else (8, 64, 1024)
    special = {} if whole else {"bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config: Any = tf.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=length, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **special,
        )  # fmt: skip
        model: nn.Module = tf.GPT2LMHeadModel(config)
    elif name == "llama2":
        vocabulary = 32000 if whole else vocabulary
        config = tf.LlamaConfig(
            hidden_size=hidden, intermediate_size=6912 if whole else 384, num_hidden_layers=layers,
            num_attention_heads=20 if whole else heads, vocab_size=vocabulary, max_position_embeddings=length,
            use_cache=False, **special,
        )  # fmt: skip
        model = tf.LlamaForCausalLM(config)
    else:
        config = tf.GPTNeoConfig(
            hidden_size=hidden, num_layers=layers, num_heads=heads, vocab_size=vocabulary, use_cache=False,
            attention_types=[[["global", "local"], layers // 2 + layers % 2]] if whole else [[["global"], layers]],
            max_position_embeddings=length, embed_dropout=0.0, attention_dropout=0.0, resid_dropout=0.0, **special,
        )  # fmt: skip
        model = tf.GPTNeoForCausalLM(config)
    ids = torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Way:
    """One sharding by hand: its name, the marked dims, the pinned options."""

    name: str
    embedding: int | None
    pins: Mapping[str, Any]


def ways(ranks: int) -> Iterator[Way]:
    """The person's sweep."""
    for tensor in (n for n in range(1, ranks + 1) if ranks % n == 0):
        data = ranks // tensor
        for stage in (0, 1, 2, 3) if data > 1 else (0,):
            for sequence in (False, True) if tensor > 1 else (None,):
                for embedding in (0, 1) if tensor > 1 else (None,):
                    pins: dict[str, Any] = {"dp": data, "tp": tensor, "zero": stage}
                    if sequence is not None:
                        pins["sequence_parallel"] = sequence
                    told = f"{'fsdp ' if stage == 3 else f'zero-{stage} ' if stage else 'dp '}{data} x tp {tensor}"
                    told += {None: "", False: "", True: " sp"}[sequence]
                    told += {None: "", 0: " vocabulary", 1: " features"}[embedding]
                    yield Way(told, embedding, pins)


def marked(name: str, model: nn.Module, embedding: int | None) -> nn.Module:
    """The model with Megatron's marks."""
    if embedding is not None:
        for ours, parameter in model.named_parameters():
            cut = embedding if ours.endswith(EMBEDDINGS) else None
            for end, dim in MARKS[name].items():
                cut = dim if ours.endswith(end) else cut
            if cut is not None:
                mw.mark_sharding(parameter, {"tp": cut})
    return model


def planned(
    make: Callable[[], tuple[nn.Module, Batch]], name: str, way: Way, **options: Any
) -> ParallelPlan | None:
    """The person's plan; None where it is refused or does not fit."""
    for recompute in (None, "full"):
        model, batch = make()
        try:
            plan = mw.plan(
                marked(name, model, way.embedding),
                batch,
                planner="manual",
                recompute=recompute,
                **options,
                **way.pins,
            )
        except MeshwrightError:
            continue
        assert isinstance(plan, ParallelPlan)
        return plan
    return None


def seconds(plan: ParallelPlan) -> float:
    """The predicted step."""
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def identity(plan: ParallelPlan) -> dict[str, Any]:
    """What a plan does, without what is said of it."""
    published = ("provenance", "predicted", "collectives")
    return {key: value for key, value in json.loads(plan.to_json()).items() if key not in published}


def shown(plan: ParallelPlan) -> str:
    """Degrees, stage, schedule, recomputation."""
    text = " x ".join(f"{axis}{n}" for axis, n in plan.degrees.items() if n > 1)
    text += f", stage {plan.zero.stage}" if plan.zero is not None else ""
    text += f", {plan.pipeline.schedule}" if plan.pipeline is not None else ""
    text += ", sp" if plan.sequence_parallel else ""
    return text + (", recompute" if plan.recompute else "")


def predict(name: str, ranks: int, cluster: str) -> dict[str, Any]:
    """The sweep and the automatic plan at 2B, as predicted."""

    def make() -> tuple[nn.Module, Batch]:
        with torch.device("meta"):
            return build(name, True)

    options = {"world_size": ranks, "cluster": cluster, "precision": "bf16"}
    begin = time.process_time()
    model, batch = make()
    automatic = mw.plan(model, batch, **options)
    assert isinstance(automatic, ParallelPlan)
    took = time.process_time() - begin
    plans_by_way = {
        way.name: plan for way in ways(ranks) if (plan := planned(make, name, way, **options)) is not None
    }
    best = min(plans_by_way, key=lambda key: seconds(plans_by_way[key]))
    ratio = seconds(automatic) / seconds(plans_by_way[best])
    size = sum(p.numel() for p in model.parameters()) / 1e9
    print(
        f"{name} ({size:.2f}B), {cluster}, {ranks} ranks: automatic {1e3 * seconds(automatic):.1f} ms ({shown(automatic)}; "
        f"found in {took:.1f} s), best of {len(plans_by_way)} by hand {1e3 * seconds(plans_by_way[best]):.1f} ms ({best}"
        f"{', recompute' if plans_by_way[best].recompute else ''}): {ratio:.3f}",
        flush=True,
    )
    return {
        "model": name, "parameters": size, "cluster": cluster, "ranks": ranks, "ratio": ratio, "automatic": shown(automatic),
        "automatic_seconds": seconds(automatic), "by_hand": {key: seconds(plan) for key, plan in plans_by_way.items()},
    }  # fmt: skip


def turns(rank: int, size: int, name: str, plans: list[ParallelPlan], limit: float) -> list[list[float]]:
    """Per configuration the seconds of its steps: one step of each in turns, as the slowest rank has it."""
    times: list[list[float]] = [[] for _ in plans]
    with living_together((*build(name, False), plan) for plan in plans) as steps:
        begin, number = time.perf_counter(), 0
        while True:
            for place in range(len(steps)) if number % 2 == 0 else reversed(range(len(steps))):
                took = steps[place]()
                if number >= 3:  # what is done once is nobody's
                    times[place].append(took)
            number += 1
            late = torch.tensor(float(time.perf_counter() - begin > limit and number >= 8))
            dist.broadcast(late, 0)
            if late:
                return times


def measure(pool: RankPool, name: str, ranks: int, cluster: str, limit: float) -> dict[str, Any]:
    """The sweep and the automatic plan, small, run in turns."""

    def make() -> tuple[nn.Module, Batch]:
        with mw.deferred_init():
            return build(name, False)

    options = {"world_size": ranks, "cluster": cluster}
    model, batch = make()
    automatic = mw.plan(model, batch, **options)
    assert isinstance(automatic, ParallelPlan)
    names, plans = ["automatic"], [automatic]
    for way in ways(ranks):
        plan = planned(make, name, way, **options)
        if (
            plan is not None and way.embedding != 1
        ):  # by features is another way at the same cost at this size
            names.append(way.name)
            plans.append(plan)
    times = pool.run(ranks, turns, name, plans, limit, timeout=limit + 240)[0]
    same = {key for key, plan in zip(names, plans, strict=True) if identity(plan) == identity(automatic)}
    middle = {key: statistics.median(ours) for key, ours in zip(names, times, strict=True)}
    best = min(names[1:], key=lambda key: middle[key])
    rounds = [mine / other for mine, other in zip(times[0], times[names.index(best)], strict=True)]
    low, ratio, high = statistics.quantiles(rounds, n=4)
    told = "the same plan" if best in same else f"quartiles {low:.3f} to {high:.3f} of {len(rounds)} rounds"
    print(
        f"{name}, {ranks} ranks: automatic {1e3 * middle['automatic']:.1f} ms ({shown(automatic)}), best of {len(names) - 1} by "
        f"hand {1e3 * middle[best]:.1f} ms ({best}): {ratio:.3f} ({told})"
    )
    for key in sorted(names, key=lambda key: middle[key]):
        print(
            f"    {1e3 * middle[key]:8.1f} ms measured {1e3 * seconds(plans[names.index(key)]):8.1f} predicted  {key}"
        )
    sys.stdout.flush()
    return {"model": name, "ranks": ranks, "ratio": ratio, "quartiles": [low, high], "rounds": len(rounds), "same": best in same,
            "automatic": shown(automatic), "milliseconds": {key: 1e3 * value for key, value in middle.items()}}  # fmt: skip


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", default=",".join(MARKS))
    parser.add_argument(
        "--cluster", default=None, help="of what is measured: a file that `meshwright calibrate` wrote"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="of measuring, for all models together")
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    options = parser.parse_args()
    models = options.only.split(",")
    results, good = [], True
    if options.predict or not options.measure:
        for ranks, cluster in ((8, "dgx-a100"), (16, "p3.16xlarge")):
            for name in models:
                results.append(predict(name, ranks, cluster))
                good &= results[-1]["ratio"] <= 1 + 1e-9
    if options.measure:
        with RankPool() as pool:
            for name in models:
                limit = 60 * options.minutes / len(models)
                results.append(measure(pool, name, 4, options.cluster or "laptop-cpu", limit))
                good &= results[-1]["same"] or results[-1]["ratio"] <= 1 + NOISE
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if good else 4


if __name__ == "__main__":
    sys.exit(main())
