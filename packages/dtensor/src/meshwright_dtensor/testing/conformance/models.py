"""The model, batch, cluster and requests with which plugins are asked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from meshwright_dtensor.cluster.cluster import Cluster, LinkLevel
from meshwright_dtensor.cluster.links import Link
from meshwright_dtensor.strategy import AttentionUse, ModelSizes, ParameterSize, SearchRequest, StepContext
from meshwright_dtensor.utils.host import HOST

WIDTH, WORDS, ROWS, TOKENS = 16, 24, 8, 8

CLUSTER = Cluster(
    name="conformance",
    devices_per_node=8,
    memory_bytes=1 << 30,
    flops={"float32": 1e10},
    memory_bandwidth=1e10,
    links=(LinkLevel("loopback", 0, 1e-5, 1e9),),
    source="made up for checks of plugins",
    fused_attention=False,
)

LINK = Link("loopback", 1e-5, 1e9)


class Block(nn.Module):
    """Causal attention and two products, each with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        q, k, v = (part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class LanguageModel(nn.Module):
    """A language model of four blocks with a loss; its parameters are named as those of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    """The model, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel()


def batch() -> dict[str, torch.Tensor]:
    """Eight rows of eight tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (ROWS, TOKENS + 1), generator=generator, device=HOST)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def requests() -> Iterator[SearchRequest]:
    """Requests for several worlds and batches, with sizes of a small model."""
    attention = AttentionUse(
        1 << 16, 1 << 17, 1 << 16, heads=4, key_heads=2, causal=True, seconds=1e-4, count=4
    )
    unit = tuple(ParameterSize(shape, (), (4, 4), True) for shape in ((64, 32), (64,), (33,)))
    sizes = ModelSizes(
        parameter_bytes=1 << 22,
        gradient_bytes=1 << 22,
        activation_bytes=1 << 24,
        state_bytes=1 << 24,
        flops=1e9,
        layers=4,
        attention=(attention,),
        units=(unit,) * 5,
    )
    step = StepContext(microbatches=2, forward_seconds=1e-2, backward_seconds=2e-2)
    for world_size in (1, 2, 4, 6, 8):
        for batch_size in (1, 8, 12):
            yield SearchRequest(world_size, batch_size, 8, sizes=sizes, step=step)
