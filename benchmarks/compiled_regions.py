"""Steps of models with compiled repeated blocks against the same steps in eager mode, on two ranks.

    python benchmarks/compiled_regions.py [--rounds 15] [--only streaming,Llama] [--layout dp2,tp2]

Both take turns, one step each, in the same processes, after enough steps that everything is compiled. Printed is the median of the
ratios of such pairs of steps, with the least and the largest; below 1 the compiled one is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
import transformers
from taking_turns import timed_pairs
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

HIDDEN, ROWS, TOKENS, LAYERS = 512, 8, 128, 4
WARM_UP = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "zero": 0},
    "tp2": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp2": {"pp": 2},
}


class Norm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Streaming(nn.Module):
    """Operations that stream through memory: norms, rotary, GELU, gates, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Norm(), Norm(), nn.LayerNorm(HIDDEN)
        self.gain = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.first(x)
        a, b = h.chunk(2, -1)
        x = x + F.gelu(h * cos + torch.cat((-b, a), -1) * sin) * self.gain
        h = self.second(x)
        x = x + F.gelu(h, approximate="tanh") * torch.sigmoid(h)
        return x + F.silu(self.third(x))


class Streams(nn.Module):
    """A stack of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Streaming() for _ in range(LAYERS))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, cos, sin)
        return {"loss": x.pow(2).mean()}


def _text(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = getattr(transformers, kind)
        config = model.config_class(vocab_size=1024, **fields)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        made: nn.Module = model(config)
        return made.train()

    return make


_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "streaming": Streams,
    "Llama": _text("LlamaForCausalLM", **_SIZES),
    "GPT2": _text("GPT2LMHeadModel", n_embd=HIDDEN, n_layer=LAYERS, n_head=8),
    "Bert": _text("BertForMaskedLM", **_SIZES),
    "Mixtral": _text("MixtralForCausalLM", **_SIZES, num_local_experts=4, num_key_value_heads=4),
}


def batch_of(name: str) -> dict[str, Tensor]:
    """Rows of tokens, or of their values."""
    generator = torch.Generator().manual_seed(1)
    if name == "streaming":
        waves = torch.randn(2, TOKENS, HIDDEN, generator=generator)
        x = torch.randn(ROWS, TOKENS, HIDDEN, generator=generator)
        return {"x": x, "cos": waves[0], "sin": waves[1]}
    ids = torch.randint(0, 1024, (ROWS, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


def stepper(name: str, plan: ParallelPlan) -> Callable[[], float]:
    """One training step; its loss."""
    torch.manual_seed(0)
    batch = batch_of(name)
    model = mw.parallelize(MODELS[name](), plan, batch=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        # dropout: both take the same masks
        torch.manual_seed(2)
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def times(
    rank: int, ranks: int, rounds: int, name: str, plans: list[str]
) -> tuple[float, list[tuple[float, float]], float]:
    """Seconds until all is compiled, of compiled and eager steps in turn, and the largest difference of a loss."""
    transformers.logging.set_verbosity_error()
    steps = [stepper(name, ParallelPlan.from_json(plan)) for plan in plans]
    start = time.monotonic()
    losses = [[step() for _ in range(WARM_UP)] for step in steps]
    seconds = time.monotonic() - start
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return seconds, timed_pairs(steps, rounds), difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help=f"comma-separated: {', '.join(MODELS)}")
    parser.add_argument("--layout", help=f"comma-separated: {', '.join(LAYOUTS)}")
    arguments = parser.parse_args()
    print(
        "| model | layout | eager ms | compiled of eager (least, most) | first steps s | losses differ by |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for name in arguments.only.split(",") if arguments.only else MODELS:
        for layout in arguments.layout.split(",") if arguments.layout else LAYOUTS:
            plans = []
            for compiled in (True, None):
                plan: Any = mw.plan(
                    MODELS[name](),
                    batch_of(name),
                    cluster="laptop-cpu",
                    world_size=2,
                    compile=compiled,
                    **LAYOUTS[layout],
                )
                plans.append(plan.to_json())
            with RankPool() as pool:
                seconds, timed, difference = pool.run(2, times, arguments.rounds, name, plans, timeout=600)[0]
            ratios = sorted(a / b for a, b in timed)
            eager = 1e3 * statistics.median(b for _, b in timed)
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"
            print(
                f"| {name} | {layout} | {eager:.0f} | {spread} | {seconds:.0f} | {difference:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
