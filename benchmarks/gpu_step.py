"""A world of one GPU: what meshwright costs next to plain torch, and what the planner predicts of time and memory.

    python benchmarks/gpu_step.py [--layers 4] [--rows 2] [--length 2048] [--rounds 12] [--small] [--json gpu.json]

Layers as of Llama-3 8B in bfloat16 (hidden 4096, 32 heads, 8 key-value heads, 14336 in the MLP), AdamW fused. Ours and
plain torch take turns, a step each; a step is timed by events of the device. What is printed is the median of the ratios
of such pairs, the least and the largest. Memory is `torch.cuda.max_memory_allocated` of a step of ours alone.
`--small`: a hidden size of 256, where the time of the host shows. The last lines are verdicts: at most 1.02 of plain torch, and
memory within 5 % of what was allocated. Without a GPU (`--only-on-gpu`) one line says that they wait for one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan

Step = Callable[[], Tensor]
MOST_RATIO, MOST_ERROR = 1.02, 0.05


def build(options: argparse.Namespace, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 256 if options.small else 4096
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32768, hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=options.layers,
        num_attention_heads=hidden // 128 if hidden > 256 else 4, num_key_value_heads=8 if hidden > 256 else 4,
        max_position_embeddings=8192, use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, 32768, (options.rows, options.length), device=device)
    return model, {"input_ids": ids, "labels": ids}


def step_of(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def timed(step: Step, device: str) -> tuple[float, float]:
    """Milliseconds of a step on the device, and of the host until all was launched."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        return 1e3 * seconds, 1e3 * seconds
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    step()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return begin.elapsed_time(end), 1e3 * host


def peak_of(step: Step, device: str) -> int:
    """Bytes at the highest point of a step."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def verdicts(ratio: float, error: float) -> list[str]:
    """A line for each of the two goals. `ratio`: of a step to plain torch's; `error`: of the predicted peak, relative."""
    return [
        f"overhead: {'met' if ratio <= MOST_RATIO else 'MISSED'}: {ratio:.3f} of plain torch, at most {MOST_RATIO}",
        f"memory: {'met' if abs(error) <= MOST_ERROR else 'MISSED'}: predicted {error:+.1%} of what was allocated, "
        f"within {MOST_ERROR:.0%}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    parser.add_argument("--only-on-gpu", action="store_true", help="do nothing on the CPU but say so")
    options = parser.parse_args()
    if options.only_on_gpu and not torch.cuda.is_available():
        print("no GPU here: 2 verdicts wait for one (overhead of a world of one, memory of the plan)")
        return 0
    device = str(mw.init())
    kind = torch.device(device).type
    model, batch = build(options, device)
    plan = mw.plan(model, batch, world_size=1, cluster=None if kind == "cuda" else "laptop-cpu")
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    ours = step_of(mw.parallelize(model, plan, batch=batch), batch)
    losses = [float(ours().detach()) for _ in range(3)]
    peak = peak_of(ours, kind)
    alone = step_of(*build(options, device))
    expected = [float(alone().detach()) for _ in range(3)]
    pairs = []
    alone()
    for _ in range(options.rounds):
        pairs.append((timed(ours, kind), timed(alone, kind)))
    ratios = sorted(mine / plain for (mine, _), (plain, _) in pairs)
    row: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu", "torch": torch.__version__,
        "hidden": 256 if options.small else 4096, "layers": options.layers, "rows": options.rows,
        "length": options.length, "losses": losses, "losses_alone": expected,
        "step_ms": statistics.median(mine for (mine, _), _ in pairs),
        "alone_ms": statistics.median(plain for _, (plain, _) in pairs),
        "host_ms": statistics.median(host for (_, host), _ in pairs),
        "host_alone_ms": statistics.median(host for _, (_, host) in pairs),
        "ratio": statistics.median(ratios), "least": ratios[0], "largest": ratios[-1],
        "predicted_ms": 1e3 * plan.predicted.step_seconds, "peak": peak,
        "predicted_peak": plan.predicted.total_bytes, "parts": dict(plan.predicted.memory_bytes),
    }  # fmt: skip
    if peak:
        row["verdicts"] = verdicts(row["ratio"], row["predicted_peak"] / peak - 1)
    for key, value in row.items():
        if key != "verdicts":
            print(f"{key:16} {value}")
    for verdict in row.get("verdicts", []):
        print(verdict)
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=1) + "\n")
    gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
