"""Forms of torch's optimizers on a small language model with odd sizes: three steps are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.verification.compare import compare, whole

VOCABULARY, HEAD, LENGTH, HIDDEN = 23, 3, 9, 21
WIDTH = 2 * HEAD


class Block(nn.Module):
    """Attention and a feed-forward part; no bias whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x + self.o(h))))


class Language(nn.Module):
    """A tied table, positions, and a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        x = self.head(self.norm(self.block(x))) * self.scale
        return F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class OwnASGD(optim.ASGD):
    """A user's subclass is stepped on DTensors, with plain counts."""


class OwnNAdam(optim.NAdam):
    """Likewise."""


SHARDED = {"*.q.*": 0, "*.k.*": 0, "*.v.*": 0, "*.o.*": 1, "*.up.*": 0, "*.down.weight": 1, "table.*": 0}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"degrees": {"dp": 2}},
    "zero3": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
    "tp2": {
        "degrees": {"tp": 2},
        "parameters": tuple(
            ParameterRule(pattern=name, placement={"tp": f"S({dim})"}) for name, dim in SHARDED.items()
        ),
    },
}
FORMS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "adafactor": lambda ps: optim.Adafactor(ps, foreach=False, weight_decay=0.1),
    "adafactor-foreach": lambda ps: optim.Adafactor(ps, foreach=True, maximize=True),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=torch.tensor(0.5), foreach=False),
    "adadelta-foreach": lambda ps: optim.Adadelta(ps, foreach=True, weight_decay=0.1),
    "adamax": lambda ps: optim.Adamax(ps, foreach=False),
    "adamax-foreach": lambda ps: optim.Adamax(ps, foreach=True),
    "adamw-fused": lambda ps: optim.AdamW(ps, lr=torch.tensor(1e-2), fused=True, amsgrad=True),
    "asgd": lambda ps: optim.ASGD(ps, foreach=False, t0=1),
    "asgd-foreach": lambda ps: optim.ASGD(ps, foreach=True, t0=1),
    "asgd-derived": lambda ps: OwnASGD(ps, foreach=True, t0=1),
    "nadam": lambda ps: optim.NAdam(ps, foreach=False),
    "nadam-foreach": lambda ps: optim.NAdam(ps, foreach=True, decoupled_weight_decay=True, weight_decay=0.1),
    "nadam-derived": lambda ps: OwnNAdam(ps, foreach=True),
    "radam": lambda ps: optim.RAdam(ps, lr=torch.tensor(1e-2), foreach=False),
    "radam-foreach": lambda ps: optim.RAdam(ps, foreach=True),
    "rprop": lambda ps: optim.Rprop(ps, foreach=False),
    "rprop-foreach": lambda ps: optim.Rprop(ps, foreach=True, maximize=True),
}


def pair(layout: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Language().to(dtype))
    return models[0], parallelize(models[1], ParallelPlan(world_size=2, **PLANS[layout]))


def states(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor | None]:
    return {
        f"{name}/{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor)
    }


def backward(model: nn.Module, step: int) -> None:
    ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=seeded(step))
    model.zero_grad()
    model(ids).backward()


def _wrong(rank: int, world_size: int, layout: str) -> dict[str, list[str]]:
    """In double precision: a difference above that of summation order is a wrong step."""
    actual = {}
    for name, make in FORMS.items():
        ends = []
        for model in pair(layout, torch.float64):
            optimizer = make(list(model.parameters()))
            for step in range(3):
                backward(model, step)
                optimizer.step()
            ends.append({**dict(model.named_parameters()), **states(model, optimizer)})
        compared = compare(0, "gradient", ends[0], ends[1], None)
        assert len(compared) > 20
        actual[name] = [f"{c.name} {c.relative:.1e} {c.note}" for c in compared if not c.ok]
    return {name: wrong for name, wrong in actual.items() if wrong}


@pytest.mark.slow
@pytest.mark.parametrize("layout", PLANS)
def test_each_form_steps_as_on_one_device(rank_pool: RankPool, layout: str) -> None:
    for wrong in rank_pool.run(2, _wrong, layout):
        assert wrong == {}


def _muon(rank: int, world_size: int, layout: str) -> tuple[list[str], list[str], bool]:
    """With the same gradients on both sides: matrices that are not bit-equal, of Muon and of a subclass."""

    class Derived(optim.Muon):
        pass

    unequal: list[list[str]] = []
    placed = False
    for kind in (optim.Muon, Derived):
        ends = []
        for model in pair(layout, torch.float32):
            matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "block" in n}
            optimizer = kind(list(matrices.values()), lr=0.02)
            generator = seeded(1)
            backward(model, 0)
            for _ in range(3):
                for parameter in matrices.values():
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
            moments = {f"{n}/moment": optimizer.state[p]["momentum_buffer"] for n, p in matrices.items()}
            ends.append({n: whole(x) for n, x in {**matrices, **moments}.items()})
            if kind is optim.Muon and hasattr(moments["block.q.weight/moment"], "placements"):
                placed = all(moments[f"{n}/moment"].placements == p.placements for n, p in matrices.items())
        unequal.append([n for n, x in ends[0].items() if not torch.equal(x, ends[1][n])])
    return unequal[0], unequal[1], placed


@pytest.mark.slow
@pytest.mark.parametrize("layout", PLANS)
def test_muon_orthogonalises_whole_matrices(rank_pool: RankPool, layout: str) -> None:
    for wrong, derived, placed in rank_pool.run(2, _muon, layout):
        assert not wrong and placed
        # the control: products of shards are rounded otherwise
        assert bool(derived) == (layout != "dp2")


class Looked(nn.Module):
    """A table whose gradient is sparse on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH, sparse=True), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().sum()


def _sparse(rank: int, world_size: int) -> None:
    ids = torch.arange(4)[:, None]
    for degrees in ({"dp": 2}, {"tp": 2}):
        plan = ParallelPlan(world_size=2, degrees=degrees)
        with pytest.raises(UnsupportedError, match=r"table.*sparse=False"):
            parallelize(Looked(), plan)
        frozen = Looked()
        frozen.table.requires_grad_(False)
        parallelize(frozen, plan)(ids).backward()


def test_sparse_gradients_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, _sparse)
