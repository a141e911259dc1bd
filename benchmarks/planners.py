"""The default planner compared with Alpa's and FlexFlow's searches: the steps that they predict under the same costs, and how
long they
take to answer.

    python benchmarks/planners.py                       # all models
    python benchmarks/planners.py --only gpt2-1.3b      # one of them
    python benchmarks/planners.py --out benchmarks/results/planners.json
    python benchmarks/planners.py --repeats 3           # every answer so many times, in turn; the median of their times counts

Times are of the processor. Every planner answers for every model in a process of its own, which has planned a tiny model
before. Models are on meta: nothing is allocated. Exit code 4 where the default planner's step is longer than another's, or
its answer takes longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.reports.compare_planners import compare

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


def answer(case: Case, planner: str) -> dict[str, Any]:
    """What one planner says, in this process."""
    model, batch = made(case)
    request = PlanRequest(cluster=case.cluster, world_size=case.ranks, precision="bf16")
    (results,) = compare(model, batch, request, [planner]).answers
    plan = results.plan
    return {
        "step_seconds": None if plan is None or plan.predicted is None else plan.predicted.step_seconds,
        "answer_seconds": results.processor_seconds,
        "degrees": None if plan is None else dict(plan.degrees),
    }


def apart(name: str, planner: str) -> dict[str, Any]:
    """The same in a process of its own: what the first one learns of a model's operators would be a gift to the second."""
    command = [sys.executable, __file__, "--here", name, planner]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {planner}: {done.stderr[-2000:]}")
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def _median(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One of equal answers, with the median of their times."""
    return {**answers[0], "answer_seconds": statistics.median(entry["answer_seconds"] for entry in answers)}


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--repeats", type=int, default=1, help="times that each planner answers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", nargs=2, metavar=("MODEL", "PLANNER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1")
    if options.here:
        name, planner = options.here
        answer(WARM, planner)  # what is imported is nobody's
        print(json.dumps(answer(CASES[name], planner)))
        return 0
    results, failed = {}, []
    print(f"{'model':16}" + "".join(f"{name + ' step, answer':>30}" for name in PLANNERS), flush=True)
    for name in options.only or CASES:
        rounds = [{planner: apart(name, planner) for planner in PLANNERS} for _ in range(options.repeats)]
        medians = results[name] = {
            planner: _median([entry[planner] for entry in rounds]) for planner in PLANNERS
        }
        steps = {planner: entry["step_seconds"] for planner, entry in medians.items()}
        seconds = {planner: entry["answer_seconds"] for planner, entry in medians.items()}
        row = [
            f"{'nothing fits' if steps[p] is None else f'{steps[p]:.4f} s'}, {seconds[p]:7.2f} s"
            for p in PLANNERS
        ]
        print(f"{name:16}" + "".join(f"{text:>30}" for text in row), flush=True)
        ours = float("inf") if steps["eager"] is None else steps["eager"]
        others = [s for p, s in steps.items() if p != "eager" and s is not None]
        if others and ours > min(others) * (1 + 1e-9):
            failed.append(f"{name}: eager predicts {ours:.4f} s, another {min(others):.4f} s")
        if seconds["eager"] > min(seconds[p] for p in PLANNERS if p != "eager"):
            failed.append(f"{name}: eager answers in {seconds['eager']:.2f} s, another sooner")
    for line in failed:
        print(line)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
