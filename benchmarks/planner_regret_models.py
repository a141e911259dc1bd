"""The models of benchmarks/planner_regret.py: small, of shapes that favour one parallelism or another."""

from __future__ import annotations

from small_models import Batch, gpt2, llama, mixtral, tokens
from torch import nn

ROWS = 8
MODELS = ("deep", "wide", "moe", "long", "vocabulary", "gpt2")


def build(name: str) -> tuple[nn.Module, Batch]:
    """A small model of that shape, and a batch."""
    length = {"long": 512, "vocabulary": 64}.get(name, 128)
    vocabulary = {"vocabulary": 16384}.get(name, 512)
    if name == "deep":
        model = llama(vocabulary, 64, 12, 192)
    elif name == "wide":
        model = llama(vocabulary, 512, 2, 1536)
    elif name == "long":
        model = llama(vocabulary, 64, 3, 192)
    elif name == "vocabulary":
        model = llama(vocabulary, 128, 2, 384)
    elif name == "moe":
        model = mixtral(vocabulary, 128, 2, 256)
    elif name == "gpt2":
        model = gpt2(vocabulary, 128, 4, length)
    else:
        raise SystemExit(f"--models {name}: known are {', '.join(MODELS)}")
    return model, tokens(vocabulary, ROWS, length)
