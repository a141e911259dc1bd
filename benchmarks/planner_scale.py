"""How long planning takes, and how much memory: large models on many ranks, on one core of this machine.

Each case is planned in a process of its own; the time is the CPU time of `plan` alone, the memory the peak of the process.

    python benchmarks/planner_scale.py                 # all of them
    python benchmarks/planner_scale.py llama-8b-64     # one
"""

from __future__ import annotations

import json
import resource
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


def measure(name: str) -> dict[str, Any]:
    """Plan one case in this process."""
    import meshwright_planner

    make, ranks, rows, goal = CASES[name]
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


def main() -> None:
    """Measure the named cases, each in a process of its own."""
    if len(sys.argv) == 3 and sys.argv[1] == "--here":
        print(json.dumps(measure(sys.argv[2])))
        return
    for name in sys.argv[1:] or CASES:
        done = subprocess.run(
            [sys.executable, __file__, "--here", name], capture_output=True, text=True, check=False
        )
        print(
            done.stdout.splitlines()[-1] if done.returncode == 0 else f"{name}: {done.stderr[-400:]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
