"""rng="fast": copies of a value stay equal on all ranks, masks are drawn again alike, and nothing but the numbers changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import CompileRule, ParallelPlan, ParameterRule, RecomputeRule
from meshwright_dtensor.testing.on_device import random_state
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.verification.verify import verify

WIDTH = 16


class Block(nn.Module):
    """Dropout of a value that tp shards, of attention by heads, and of one that ranks of tp have whole."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.norm = p, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inner(self.up(self.norm(x))).view(*x.shape[:2], 4, 3, -1).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(*parts, dropout_p=self.p if self.training else 0.0)
        out: torch.Tensor = x + self.outer(self.down(y.transpose(1, 2).flatten(2)))
        return out


class Stack(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(p) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def plan(rng: str = "fast", **more: Any) -> ParallelPlan:
    return ParallelPlan(
        world_size=4,
        degrees={"dp": 2, "tp": 2},
        parameters=(
            ParameterRule(pattern="*up.*", placement={"tp": "S(0)"}),
            ParameterRule(pattern="*down.weight", placement={"tp": "S(1)"}),
        ),
        rng=rng,
        **more,
    )


PLANS: dict[str, tuple[float, ParallelPlan]] = {
    "fast": (0.3, plan()),
    "again": (0.3, plan()),
    "recomputed": (0.3, plan(recompute=(RecomputeRule(pattern="blocks.*"),))),
    "compiled": (0.3, plan(compile=(CompileRule(pattern="blocks.*", backend="aot_eager"),))),
    "exact": (0.3, plan("exact")),
    "fast without dropout": (0.0, plan()),
    "exact without dropout": (0.0, plan("exact")),
}


def steps(rank: int, size: int) -> dict[str, Any]:
    """Of each plan: losses of three steps, gradients that all ranks have, masks of the last dropout, the generator's state."""
    runs: dict[str, Any] = {}
    x = torch.linspace(-1, 1, 4 * 6 * WIDTH).view(4, 6, WIDTH).sin()
    for name, (p, chosen) in PLANS.items():
        torch.manual_seed(1)
        model = parallelize(Stack(p), chosen, batch=x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        masks: list[torch.Tensor] = []
        last: Any = model.blocks[-1].outer  # type: ignore[index]
        if name in ("fast", "exact"):
            last.register_forward_hook(lambda module, args, y, masks=masks: masks.append(y.to_local() == 0))
        torch.manual_seed(2)
        losses = []
        for _ in range(4):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        copies = [
            q.to_local().detach().clone()
            for n, q in model.named_parameters()
            if "norm" in n or "down.bias" in n
        ]
        runs[name] = (losses, copies, masks, random_state())
    return runs


def test_training(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(4, steps)
    for name in PLANS:
        losses, copies, _, state = ranks[0][name]
        for other in ranks[1:]:
            # copies of parameters, and with them all masks of values that ranks have alike
            assert losses == other[name][0], name
            assert all(torch.equal(a, b) for a, b in zip(copies, other[name][1], strict=True)), name
            assert torch.equal(state, other[name][3]), name
    runs = ranks[0]
    fast = runs["fast"][0]
    assert fast == runs["again"][0]
    assert fast == pytest.approx(runs["recomputed"][0], abs=1e-6)
    assert fast == pytest.approx(runs["compiled"][0], abs=1e-6)
    assert runs["fast without dropout"][0] == runs["exact without dropout"][0]
    # the negative control
    assert abs(fast[0] - runs["exact"][0][0]) > 1e-5
    # ranks are dp 0 tp 0, dp 0 tp 1, dp 1 tp 0, dp 1 tp 1
    masks = [rank["fast"][2] for rank in ranks]
    for call in range(4):
        a, b, c, d = (mask[call] for mask in masks)
        assert torch.equal(a, b) and torch.equal(c, d)
        assert not torch.equal(a, c)
        assert 0.1 < a.float().mean() < 0.5
        assert not torch.equal(a, ranks[0]["exact"][2][call])
    assert not torch.equal(masks[0][0], masks[0][1])


def refused(rank: int, size: int) -> str:
    plan = ParallelPlan(world_size=2, degrees={"dp": 2}, rng="fast")
    with pytest.raises(UsageError) as caught:
        verify(lambda: Stack(0.1), torch.randn(4, 6, WIDTH), plan)
    return str(caught.value)


def test_a_comparison_with_one_device_refuses_it(rank_pool: RankPool) -> None:
    for text in rank_pool.run(2, refused):
        assert "plan.replace(rng='exact')" in text
