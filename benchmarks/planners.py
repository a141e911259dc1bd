"""The default planner beside Alpa's and FlexFlow's searches: the steps that they predict under the same costs, and how long they
take to answer.

    python benchmarks/planners.py                       # all models
    python benchmarks/planners.py --only gpt2-1.3b      # one of them
    python benchmarks/planners.py --out benchmarks/results/planners.json

Times are of the processor. Every planner starts from nothing for every model: what one records is not there for the next.
Models are on meta: nothing is
allocated. Exit code 4 where the default planner's step is longer than another's, or its answer takes longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright_dtensor.planning import PlanRequest
from meshwright_planner.reports.comparing import Answer, compare

PLANNERS = ("eager", "alpa", "mcmc")


@dataclass(frozen=True)
class Case:
    """One model on one cluster."""

    family: str
    sizes: dict[str, Any]
    rows: int
    tokens: int
    cluster: str
    ranks: int


def _gpt(layers: int, hidden: int, heads: int, rows: int, ranks: int, cluster: str) -> Case:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024, "vocab_size": 51200}
    return Case("gpt2", sizes, rows, 1024, cluster, ranks)


def _llama(layers: int, hidden: int, inner: int, heads: int, ranks: int, rows: int, **others: int) -> Case:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        **others,
    }
    return Case("llama", sizes, rows, 4096, "dgx-h100", ranks)


CASES = {
    "deep-narrow": _llama(48, 512, 1408, 8, 8, 16),
    "wide": _llama(4, 8192, 28672, 64, 8, 16),
    "big-vocabulary": _llama(8, 1024, 2816, 16, 8, 16, vocab_size=512000),
    "gpt2-1.3b": _gpt(24, 2048, 32, 64, 4, "dgx-a100"),
    "gpt2-6.7b": _gpt(32, 4096, 32, 64, 16, "dgx-a100"),
    "llama-8b-8": _llama(32, 4096, 14336, 32, 8, 16),
    "llama-8b-64": _llama(32, 4096, 14336, 32, 64, 128),
    "llama-70b-64": _llama(80, 8192, 28672, 64, 64, 128),
    "mixtral": Case(
        "mixtral",
        {
            "num_hidden_layers": 8,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
        },
        16,
        1024,
        "dgx-h100",
        8,
    ),
}

WARM = Case(
    "gpt2",
    {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0},
    4,
    64,
    "dgx-h100",
    4,
)


def made(case: Case) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its batch, on meta."""
    config = AutoConfig.for_model(case.family, **case.sizes, use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        tokens = torch.empty((case.rows, case.tokens), dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def run(case: Case) -> dict[str, Answer]:
    """The planners' answers, each for a model of its own."""
    found = {}
    for planner in PLANNERS:
        model, batch = made(case)
        request = PlanRequest(cluster=case.cluster, world_size=case.ranks, precision="bf16")
        (found[planner],) = compare(model, batch, request, [planner]).answers
    return found


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run(WARM)  # what is imported and learnt of operators the first time is nobody's
    results, failed = {}, []
    print(f"{'model':16}" + "".join(f"{name + ' step, answer':>30}" for name in PLANNERS), flush=True)
    for name in options.only or CASES:
        answers = run(CASES[name])
        steps = {
            p: a.plan.predicted.step_seconds if a.plan is not None and a.plan.predicted is not None else None
            for p, a in answers.items()
        }
        row = [
            f"{'nothing fits' if steps[p] is None else f'{steps[p]:.4f} s'}, {answers[p].processor_seconds:7.2f} s"
            for p in PLANNERS
        ]
        print(f"{name:16}" + "".join(f"{text:>30}" for text in row), flush=True)
        own = steps["eager"] if steps["eager"] is not None else float("inf")
        others = [s for p, s in steps.items() if p != "eager" and s is not None]
        if others and own > min(others) * (1 + 1e-9):
            failed.append(f"{name}: eager predicts {own:.4f} s, another {min(others):.4f} s")
        if answers["eager"].processor_seconds > min(
            answers[p].processor_seconds for p in PLANNERS if p != "eager"
        ):
            failed.append(
                f"{name}: eager answers in {answers['eager'].processor_seconds:.2f} s, another sooner"
            )
        results[name] = {
            p: {
                "step_seconds": steps[p],
                "answer_seconds": answers[p].processor_seconds,
                "degrees": None if answers[p].plan is None else dict(answers[p].plan.degrees),  # type: ignore[union-attr]
            }
            for p in PLANNERS
        }
    for line in failed:
        print(line)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
