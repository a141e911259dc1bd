"""The model that every script of this folder trains, its batch and its optimizer: a Llama in plain PyTorch, for one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Step = Callable[[], Tensor | None]
"""One training step: the loss of this rank's part of the batch, or None where another rank has it."""


@dataclass(frozen=True)
class Sizes:
    """Of a model and its global batch. `experts`: 0 for a dense model; each token is sent to two of them."""

    width: int = 256
    inner: int = 768
    layers: int = 4
    heads: int = 8
    vocabulary: int = 2048
    rows: int = 8
    tokens: int = 128
    experts: int = 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x [rows, heads, tokens, head size], cos and sin [tokens, head size]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.head = sizes.width, sizes.width // sizes.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of [rows, heads, tokens, head size]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.count = sizes.experts
        self.up = nn.Parameter(torch.randn(sizes.experts, sizes.inner, sizes.width) * 0.02)
        self.down = nn.Parameter(torch.randn(sizes.experts, sizes.width, sizes.inner) * 0.02)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, width], chosen and weights [tokens, 2]: the weighted sum of the results of the chosen experts."""
        out = torch.zeros_like(x)
        for expert in range(self.count):
            token, slot = torch.where(chosen == expert)
            y = F.linear(F.silu(F.linear(x[token], self.up[expert])), self.down[expert])
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


class Mixture(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = Experts(sizes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        return self.experts(tokens, chosen, weights).view(x.shape)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.mlp = Mixture(sizes) if sizes.experts else Mlp(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [rows, tokens]: the mean loss of all tokens."""
        cos, sin = self.rotary(torch.arange(ids.shape[1]))
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss_of(self.lm_head(self.norm(x)), labels)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, None] * 1e4 ** (-torch.arange(0, self.head, 2) / self.head)
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model_of(sizes: Sizes) -> Llama:
    """With the same values on every rank."""
    torch.manual_seed(0)
    return Llama(sizes)


def batch_of(sizes: Sizes) -> Batch:
    """The global batch: random tokens, each the label of that before it."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.tokens + 1), generator=generator)
    return {"ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def optimizer_of(parameters: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]
