"""Mixture-of-experts models as users write them, and modules that only look like experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.on_device import seeded
from meshwright_parallel.moe.detect import detect
from meshwright_parallel.moe.plan_rules import placements_of, rules_of

EXPERTS, WIDTH, INNER, VOCABULARY = 4, 8, 12, 32
Problems = list[tuple[str, float]]


class Fused(nn.Module):
    """Experts as rows of three-dimensional weights, with biases."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.many = experts
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.3)
        self.up_bias = nn.Parameter(torch.randn(experts, inner) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.3)

    def one(self, x: Tensor, expert: int) -> Tensor:
        return F.silu(x @ self.up[expert] + self.up_bias[expert]) @ self.down[expert]

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.many):
            token, slot = torch.where(chosen == expert)
            out.index_add_(0, token, self.one(tokens[token], expert) * weights[token, slot, None])
        return out


class Container(nn.ModuleList):
    """Experts as children; those that no token chose are not called."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(experts)
        )

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            out.index_add_(0, token, self[expert](tokens[token]) * weights[token, slot, None])
        return out


class Masked(Container):
    """The same with an assignment of one flag per expert."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert, child in enumerate(self):
            token, slot = torch.where(chosen[:, :, expert] > 0)
            if token.numel():
                out.index_add_(0, token, child(tokens[token]) * weights[token, slot, None])
        return out


class Sequences(Fused):
    """Tokens are [B, S, H], the rest is by token."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, length, width = tokens.shape
        return super().forward(tokens.reshape(-1, width), chosen, weights).view(rows, length, width)


class Across(Sequences):
    """Rows of one sequence are independent, sequences are not."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens + tokens.roll(1, 0), chosen, weights)


class Averaging(Fused):
    """Wrong combination: the slots of a token do not add up."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, chosen, weights) / chosen.shape[1]


class Mixing(Fused):
    """Rows are not independent."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # half of the mean: rows that are all alike would leave nothing but rounding to compare
        return super().forward(tokens - tokens.mean(0) / 2, chosen, weights)


class Dense(Fused):
    """Every expert is computed for every token, and masked."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        hot = (F.one_hot(chosen, self.many) * weights[..., None]).sum(1)
        return torch.stack([self.one(tokens, e) * hot[:, e, None] for e in range(self.many)]).sum(0)


class Dropping(Fused):
    """Random numbers are drawn inside."""

    def one(self, x: Tensor, expert: int) -> Tensor:
        return F.dropout(super().one(x, expert), 0.1, self.training)


class Full(Fused):
    """Experts with a capacity of a few rows each, while training."""

    def one(self, x: Tensor, expert: int) -> Tensor:
        out = super().one(x, expert)
        if self.training:
            out = torch.cat([out[:8], torch.zeros_like(out[8:])])
        return out


class Counting(Fused):
    """Counts the rows of each expert in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(EXPERTS))

    def one(self, x: Tensor, expert: int) -> Tensor:
        self.rows[expert] += len(x)
        return super().one(x, expert)


class Shifted(Fused):
    """Runs another expert than the assignment names."""

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, (expert + 1) % self.many)


class Alone(nn.Module):
    """Looks like experts, but takes no assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up @ self.down).sum(0)


class Block(nn.Module):
    """A router, experts, a shared expert and an auxiliary loss."""

    def __init__(self, kind: type[nn.Module], top: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = kind()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.top, self.masked, self.divided = top, kind is Masked, issubclass(kind, Sequences)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(self.top, -1)
        if self.masked:
            chosen = F.one_hot(chosen, EXPERTS)
        out = self.experts(x if self.divided else flat, chosen, weights).view(flat.shape) + self.shared(flat)
        return out.view(x.shape), scores


class Mixture(nn.Module):
    """Token ids [B, S] to a loss, with a load-balancing loss over the whole batch."""

    def __init__(self, kind: type[nn.Module] = Fused, top: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, top) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x, balance = self.embed(ids), 0.0
        for block in self.blocks:
            update, scores = block(self.norm(x))
            x = x + update
            share = F.one_hot(scores.argmax(-1), EXPERTS).float().mean(0)
            balance = balance + (share * scores.mean(0)).sum() * EXPERTS
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * balance
        return SimpleNamespace(loss=loss, logits=logits)


def mixture(kind: type[nn.Module] = Fused, top: int = 2) -> Mixture:
    torch.manual_seed(3)
    return Mixture(kind, top)


def tokens(rows: int = 4, seed: int = 0, same: bool = False) -> dict[str, Tensor]:
    """A batch; `same`: all tokens are equal, so that most experts, and some ranks, get none."""
    ids = torch.randint(VOCABULARY, (rows, 5), generator=seeded(seed))
    if same:
        ids = torch.full_like(ids, 7)
    labels = ids.roll(1, 1)
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


def plan_for(model: nn.Module, degrees: dict[str, int]) -> ParallelPlan:
    """A plan that shards every module of experts along ep."""
    detection = detect(model)
    world = 1
    for degree in degrees.values():
        world *= degree
    placements = placements_of(detection, degrees)
    rules = tuple(ParameterRule(pattern=name, placement=states) for name, states in placements.items())
    return ParallelPlan(world_size=world, degrees=degrees, parameters=rules, experts=rules_of(detection))


def full(tensor: Any) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differences(got: nn.Module, want: nn.Module, what: str, limit: float = 1e-5) -> Problems:
    """Tensors that differ by more than `limit` of their largest value, or are None on one side only."""
    wrong: Problems = []
    for (name, p), (_, q) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        a, b = (full(p.grad), q.grad) if what == "gradient" else (full(p), q.detach())
        if (a is None) != (b is None):
            wrong.append((f"{name}: {what} is {'None' if a is None else 'there'}", float("inf")))
        elif b is not None:
            off = float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
            if not off <= limit:
                wrong.append((f"{name}: {what}", off))
    return wrong
