"""Recomputed modules: the values of one device with less memory; nothing is drawn or counted twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_dtensor.errors import PlanError, UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, RecomputeRule
from meshwright_dtensor.testing.on_device import device_type, random_state, seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.verification.compare import compare

LAYOUTS = {"tp2": {"dp": 1, "tp": 2}, "dp2": {"dp": 2, "tp": 1}}
WIDTH = 16


class Block(nn.Module):
    """Dropout, batch statistics, a buffer that the output depends on, a keyword, a shared mask."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor) -> torch.Tensor:
        h = self.norm(x) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        h = self.dropout(F.gelu(self.up(h)).exp().tanh())
        return x + self.down(h) * gate


class Stack(nn.Module):
    """Two blocks that share an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        gate = torch.sigmoid(h.mean(dim=-1, keepdim=True))
        for block in self.blocks:
            h = block(h, gate=gate)
        return (h**2).mean()


def plan(degrees: dict[str, int], *recompute: RecomputeRule) -> ParallelPlan:
    """Both linears of a block on `tp`, as Megatron does it."""
    rules = (
        ParameterRule(pattern="*.up.*", placement={"tp": "S(0)"}),
        ParameterRule(pattern="*.down.weight", placement={"tp": "S(1)"}),
    )
    return ParallelPlan(world_size=2, degrees=degrees, parameters=rules, recompute=recompute)


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors computed inside: alive now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.device.type == device_type():
                storage = tensor.untyped_storage()
                self.seen[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self) -> int:
        """Now."""
        return sum(size for storage, size in self.seen.items() if not storage.expired())


def _steps(
    rank: int, world_size: int, degrees: dict[str, int], rules: tuple[RecomputeRule, ...]
) -> tuple[list[str], int]:
    """Differences from one device in three steps, and the bytes alive after a forward."""
    torch.manual_seed(0)
    single = Stack()
    many = copy.deepcopy(parallelize(copy.deepcopy(single), plan(degrees, *rules)))  # copies recompute too
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (single, many)]
    wrong: list[str] = []
    live = 0
    for step in range(3):
        batch = torch.randn(64, 6, generator=seeded(step))
        ends = []
        for model, optimizer in zip((single, many), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            if step == 2 and model is many:
                with LiveBytes() as counter:
                    loss = model(batch)
                    live = counter.alive()
            else:
                loss = model(batch)
            loss.backward(retain_graph=step == 1)
            if step == 1:
                (0.5 * loss).backward()  # computed again for each pass
            ends.append(random_state())
            optimizer.step()
        assert torch.equal(*ends), "the second run draws what the first drew, and no more"
        for what in (
            lambda m: dict(m.named_buffers()),
            lambda m: {n: p.grad for n, p in m.named_parameters()},
        ):
            actual = compare(step, "gradient", what(single), what(many), None)
            wrong += [f"{step} {c.name} {c.relative:.1e} {c.note}" for c in actual if not c.ok]
    return wrong, live


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_blocks_equal_one_device_with_less_memory(rank_pool: RankPool, layout: str) -> None:
    live = {}
    for policy in (None, "selective", "alternate", "full"):
        rules = () if policy is None else (RecomputeRule(pattern="blocks.*", policy=policy),)
        for wrong, held in rank_pool.run(2, _steps, LAYOUTS[layout], rules):
            assert not wrong
            live[policy] = held
    assert live["full"] < 0.5 * live[None]
    assert live["full"] < live["alternate"] < live["selective"] < 0.8 * live[None]


def _refusals(rank: int, world_size: int) -> None:
    degrees = LAYOUTS["tp2"]
    with pytest.raises(PlanError, match=r"recompute\[1\]"):
        parallelize(
            Stack(), plan(degrees, RecomputeRule(pattern="blocks.*"), RecomputeRule(pattern="layers.*"))
        )

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            y = self.inner(x)
            x.mul_(2)
            return (y * x.sum()).sum()

    rule = RecomputeRule(pattern="inner")
    model = parallelize(Writing(), ParallelPlan(world_size=2, degrees=degrees, recompute=(rule,)))
    with pytest.raises(UnsupportedError, match="modified in place"):
        model(torch.ones(2, 6)).backward()


def test_impossible_recomputation_is_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, _refusals)


def test_plan_field_recompute() -> None:
    """The field is in JSON, diff and explanation; an error names a wrong policy."""
    first = plan(LAYOUTS["tp2"], RecomputeRule(pattern="blocks.*", policy="selective"))
    assert ParallelPlan.from_json(first.to_json()) == first
    assert plan(LAYOUTS["tp2"]).diff(first) == [
        'recompute: added {"pattern": "blocks.*", "policy": "selective"}'
    ]
    assert "recomputed: blocks.* (selective)" in first.explain()
    with pytest.raises(PlanError, match="policy"):
        RecomputeRule(pattern="x", policy="some")  # type: ignore[arg-type]
