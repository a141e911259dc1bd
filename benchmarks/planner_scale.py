"""How long planning takes, and how much memory: large models on many ranks, on one core of this machine.

Each case is planned in a process of its own; the time is the CPU time of `plan` alone, the memory the peak of the process.

    python benchmarks/planner_scale.py                 # all of them
    python benchmarks/planner_scale.py llama-8b-64     # one
    python benchmarks/planner_scale.py --growth        # 8B on 8 to 16,384 ranks: how the time grows with them

Exit code 4 where a goal is missed; for the growth, where the time grows faster than ranks x log(ranks) between any two
sizes that are at least four times apart.
"""

from __future__ import annotations

import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

TOKENS = 4096


def _llama(**sizes: int) -> torch.nn.Module:
    import transformers

    config = transformers.LlamaConfig(vocab_size=128256, max_position_embeddings=8192, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def llama_8b() -> torch.nn.Module:
    """Llama-3 8B."""
    return _llama(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
    )


def llama_405b() -> torch.nn.Module:
    """Llama-3.1 405B."""
    return _llama(
        hidden_size=16384,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=53248,
    )


def deepseek_v3() -> torch.nn.Module:
    """DeepSeek-V3 671B, as the configuration class has it."""
    import transformers

    config = transformers.DeepseekV3Config()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], int, int, float]] = {
    "llama-8b-8": (llama_8b, 8, 32, 3.0),
    "llama-8b-64": (llama_8b, 64, 256, 3.0),
    "llama-8b-512": (llama_8b, 512, 1024, 3.0),
    "llama-405b-16384": (llama_405b, 16384, 2048, 10.0),
    "deepseek-v3-2048": (deepseek_v3, 2048, 4096, 10.0),
}
"""Name -> model, ranks, rows of the batch, seconds that it should take at most."""

MEMORY = 4 * 2**30


GROWTH = tuple(2**power for power in range(3, 15))
"""Ranks for which the growth is measured, 8 to 16,384; the batch has four rows for each."""


def case(name: str) -> tuple[Callable[[], torch.nn.Module], int, int, float]:
    """One of CASES, or "growth-N": 8B on N ranks."""
    if name.startswith("growth-"):
        ranks = int(name.removeprefix("growth-"))
        return llama_8b, ranks, 4 * ranks, math.inf
    return CASES[name]


def measure(name: str) -> dict[str, Any]:
    """Plan one case in this process."""
    import meshwright_planner

    make, ranks, rows, goal = case(name)
    with torch.device("meta"):
        model = make()
    ids = torch.empty(rows, TOKENS, dtype=torch.long, device="meta")
    began, wall = time.process_time(), time.perf_counter()
    plan = meshwright_planner.plan(
        model, {"input_ids": ids, "labels": ids}, cluster="dgx-h100", world_size=ranks
    )
    seconds, passed = time.process_time() - began, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert not isinstance(plan, list) and plan.predicted is not None
    pipeline = None if plan.pipeline is None else (plan.pipeline.schedule, plan.pipeline.microbatches)
    return {
        "case": name,
        "cpu_seconds": round(seconds, 2),
        "wall_seconds": round(passed, 2),
        "goal_seconds": goal,
        "peak_gib": round(peak / 2**30, 2),
        "degrees": dict(plan.degrees),
        "pipeline": pipeline,
        "step_seconds": round(plan.predicted.step_seconds, 3),
        "met": seconds <= goal and peak <= MEMORY,
    }


def apart(name: str) -> dict[str, Any] | None:
    """Measure one case in a process of its own; None where that failed."""
    command = [sys.executable, __file__, "--here", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}: {done.stderr[-400:]}", flush=True)
        return None
    print(done.stdout.splitlines()[-1], flush=True)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def growth() -> bool:
    """Print the seconds for more and more ranks; whether they grow no faster than ranks x log(ranks)."""
    results = [(ranks, apart(f"growth-{ranks}")) for ranks in GROWTH]
    seconds = [
        (ranks * math.log(ranks), result["cpu_seconds"]) for ranks, result in results if result is not None
    ]
    logarithms = [[math.log(value) for value in values] for values in zip(*seconds, strict=True)]
    line = statistics.linear_regression(*logarithms)
    pairs = [(a, b) for a, b in itertools.combinations(seconds, 2) if b[0] >= 4 * a[0]]
    steepest = max(math.log(b / a) / math.log(n / m) for (m, a), (n, b) in pairs)
    least, most = (end(result for _, result in seconds) for end in (min, max))
    print(
        f"{least} to {most} s from {GROWTH[0]} to {GROWTH[-1]} ranks; seconds grow with (ranks x log ranks) to the power of "
        f"{line.slope:.2f} (fitted to {len(seconds)} sizes), {steepest:.2f} where they grow fastest"
    )
    return len(seconds) == len(GROWTH) and steepest <= 1


def main() -> int:
    """Measure the named cases, each in a process of its own."""
    if len(sys.argv) == 3 and sys.argv[1] == "--here":
        print(json.dumps(measure(sys.argv[2])))
        return 0
    if sys.argv[1:] == ["--growth"]:
        return 0 if growth() else 4
    results = [apart(name) for name in sys.argv[1:] or CASES]
    return 0 if all(result is not None and result["met"] for result in results) else 4


if __name__ == "__main__":
    sys.exit(main())
