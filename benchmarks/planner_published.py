"""What the planner predicts of configurations that others have published: torchtitan's throughputs, Alpa's plans.

    python benchmarks/planner_published.py [--only torchtitan|alpa] [--json published.json]

Constants are those of the datasheets (the profiles `h100-96gb` and `p3.16xlarge`), with one efficiency of matrix products
for each device type, which the profiles name.  torchtitan: mean absolute error of tokens per second and GPU at most 15%,
and the order right.  Alpa: what the planner picks by itself is predicted at least as fast as the plan that Alpa found.  Exit
code 4 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fused_saving import fused_saving
from torch import nn

import meshwright as mw
from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.clusters.registry import named
from meshwright_planner.trace.batch import Batch

TITAN = (  # GPUs, compiled, published tokens per second and GPU (FACTS.md; torchtitan, docs/performance.md)
    (8, False, 5762),
    (8, True, 6667),
    (128, False, 5605),
    (128, True, 6514),
)
ALPA = (  # billions of parameters, GPUs, hidden, layers, heads, and the plan found: pp, dp, tp, microbatches
    (1.3, 4, 2048, 24, 32, (2, 2, 1, 128)),
    (6.7, 16, 4096, 32, 32, (2, 2, 4, 64)),
    (15, 32, 5120, 48, 40, (4, 2, 4, 128)),
    (39, 64, 8192, 48, 64, (16, 1, 4, 1024)),
)
ERROR = 0.15


def llama() -> nn.Module:
    """Llama-3 8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def gpt(hidden: int, layers: int, heads: int) -> nn.Module:
    """GPT-3's shapes with Alpa's vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=51200, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=1024, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu",
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def step(plan: Any) -> float:
    """Predicted seconds of a step."""
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    return float(plan.predicted.step_seconds)


def torchtitan() -> tuple[list[dict[str, Any]], bool]:
    """Sequences of 8,192, two for each GPU, FSDP over all, bf16, every other product computed again ("selective op")."""
    model, plans = llama(), []
    for ranks, compiled, published in TITAN:
        cluster = named("h100-96gb")
        plan = mw.plan(
            model, tokens(2 * ranks, 8192), cluster=cluster, world_size=ranks, precision="bf16",
            dp=ranks, zero=3, tp=1, cp=1, pp=1, ep=1, recompute="alternate", memory_limit=2**40,
        )  # fmt: skip
        seconds = step(plan)
        if compiled:
            local = Batch.of(tokens(2, 8192))
            seconds -= fused_saving(model, local, cluster, torch.bfloat16)
        rate = 2 * 8192 / seconds
        error = rate / published - 1
        plans.append(
            {"gpus": ranks, "compiled": compiled, "published": published, "predicted": rate, "error": error}
        )
        print(
            f"Llama-3 8B, {ranks:3} H100{', compiled' if compiled else ''}: published {published}, predicted {rate:.0f} "
            f"tokens/s/GPU ({100 * error:+.1f}%)", flush=True,
        )  # fmt: skip
    mean = statistics.mean(abs(row["error"]) for row in plans)
    pairs = itertools.combinations(plans, 2)
    ordered = all((a["published"] < b["published"]) == (a["predicted"] < b["predicted"]) for a, b in pairs)
    pick = mw.plan(model, tokens(16, 8192), cluster=named("h100-96gb"), world_size=8, precision="bf16")
    gain = 2 * 8192 / step(pick)
    print(
        f"mean absolute error {100 * mean:.1f}% (at most {100 * ERROR:.0f}%), order {'right' if ordered else 'WRONG'}; the "
        f"planner's own pick on 8: {mesh(pick)}, {gain:.0f} tokens/s/GPU (FSDP 8: {plans[0]['predicted']:.0f})"
    )
    return plans, mean <= ERROR and ordered and gain >= 0.999 * plans[0]["predicted"]


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
    parser.add_argument("--only", choices=["torchtitan", "alpa"], default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    options = parser.parse_args()
    results, holds = {}, True
    for name, run in (("torchtitan", torchtitan), ("alpa", alpa)):
        if options.only in (None, name):
            results[name], good = run()
            holds &= good
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if holds else 4


if __name__ == "__main__":
    sys.exit(main())
