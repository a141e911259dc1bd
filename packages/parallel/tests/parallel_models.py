"""Small models and hand-written plans that the tests of this package share; imported on ranks too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import seeded

VOCABULARY, WIDTH, ROWS, LENGTH = 13, 8, 4, 5


class Block(nn.Module):
    """Pre-norm feed-forward with dropout and a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Language(nn.Module):
    """A language model in miniature: tied embedding, a frozen bias, an unused layer, a buffer, a tagged parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.embed.weight.tag = "tied"  # type: ignore[attr-defined]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        h = self.embed(ids) + self.positions
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        if labels is None:
            return logits
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100)


def make(dropout: float = 0.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Language:
    torch.manual_seed(seed)
    return Language(dropout).to(dtype)


def batch_of(rows: int = ROWS, seed: int = 1) -> dict[str, torch.Tensor]:
    """Labels are ignored unevenly, so a mean per rank would be wrong."""
    generator = seeded(seed)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    labels = ids.roll(-1, 1).clone()
    labels[0, 1:] = -100
    return {"ids": ids, "labels": labels}


def plan_of(**changes: Any) -> ParallelPlan:
    """Megatron placements of `Language` on tp; pass degrees={"dp": 2, "tp": 2}."""
    degrees = changes.pop("degrees", {"dp": 1, "tp": 1})
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    rules = ()
    if "tp" in degrees:
        rules = (
            ParameterRule(pattern="*.up.*", placement={"tp": "S(0)"}),
            ParameterRule(pattern="*.down.weight", placement={"tp": "S(1)"}),
            ParameterRule(pattern="embed.weight", placement={"tp": "S(1)"}),
        )
    fields: dict[str, Any] = {"world_size": world_size, "degrees": degrees, "parameters": rules, **changes}
    return ParallelPlan(**fields)


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(tensor, (DTensor, GlobalTensor)):
        tensor = tensor.full_tensor()
    return None if tensor is None else tensor.detach().clone()


def loop(model: nn.Module, clip: Any) -> list[Any]:
    """Two AdamW steps of two accumulated batches each (the second of odd size), with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    torch.manual_seed(7)
    for step in range(2):
        for rows in (4, 3):
            loss = model(**batch_of(rows, seed=step))
            loss.backward()
            seen.append(full(loss))
        seen.append(clip(model.parameters(), 0.1))
        seen.append({n: full(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        seen.append({n: full(p) for n, p in model.named_parameters()})
    seen.append({n: full(t) for n, t in model.state_dict().items()})
    return seen


def same(actual: Any, expected: Any, **tolerance: float) -> None:
    for got, want in zip(actual, expected, strict=True):
        if isinstance(want, dict):
            assert list(got) == list(want)
            for name, value in want.items():
                assert (got[name] is None) == (value is None), name
                if value is not None:
                    torch.testing.assert_close(
                        got[name], value, msg=lambda m, n=name: f"{n}: {m}", **tolerance
                    )
        else:
            torch.testing.assert_close(got, want, **tolerance)
