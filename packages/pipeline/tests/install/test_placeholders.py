"""Errors of access to modules and parameters of other ranks, and of rows inside objects that cannot be split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipe_models import WIDTH, Chain, chain_batch, chain_plan
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline


class Encoding(Chain):
    """Has a method next to forward."""

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def reach(rank: int, size: int) -> dict[str, str]:
    """Errors on this rank; a step before and after them is that of one device."""
    torch.manual_seed(0)
    single = Encoding()
    torch.manual_seed(0)
    model = pipeline(Encoding(), chain_plan())
    batch, told = chain_batch(), {}
    first = model(**batch)["loss"].item()
    other = model.layers[3 if rank == 0 else 0]
    weight = other.outer.weight
    tries: dict[str, Any] = {
        "method": lambda: model.encode(batch["ids"]),
        "module": lambda: other(torch.zeros(1, WIDTH)),
        "part": lambda: other.norm(torch.zeros(1, WIDTH)),
        "value": lambda: weight.norm().item(),
        "compared": lambda: bool((weight == weight).all()),
        "mixed": lambda: weight + torch.ones(WIDTH, 1),
        "copied": lambda: weight.cpu(),
    }
    for name, run in tries.items():
        with pytest.raises(UnsupportedError) as error:
            run()
        told[name] = str(error.value)
    # operations that need no value work
    value = single.layers[3 if rank == 0 else 0].outer.weight
    assert weight.shape == value.shape and weight.dtype == value.dtype and weight.numel() == value.numel()
    assert (
        weight.t().shape == value.t().shape and torch.zeros(value.shape).view_as(weight).shape == value.shape
    )
    assert model(**batch)["loss"].item() == first == pytest.approx(single(**batch)["loss"].item(), rel=1e-6)
    return told


def test_values_of_other_ranks_are_named(rank_pool: RankPool) -> None:
    for rank, told in enumerate(rank_pool.run(2, reach, timeout=150)):
        layer, first = ("layers.3", "layers.2") if rank == 0 else ("layers.0", "embed")
        where = f"rank {rank} of the pipeline does not hold, rank {1 - rank} does"
        assert f"module {first!r} was called outside" in told["method"]
        assert f"module {layer!r} was called outside" in told["module"]
        assert f"module '{layer}.norm' was called outside" in told["part"]
        for name in ("method", "module", "part"):
            assert where in told[name] and "Let forward of the model do what is wanted" in told[name]
        for name in ("value", "compared", "mixed", "copied"):
            assert f"{layer}.outer.weight is what {where}" in told[name], name
            assert "a shape and no value" in told[name] and "named_parameters()" in told[name]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, packed: Any) -> Tensor:
        if not isinstance(packed, PackedSequence):
            packed = pack_padded_sequence(*packed, batch_first=True)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)
        return self.head(out)


class Holder:
    """A user's object that contains rows."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, other: Holder) -> Tensor:
        return self.layers[1](self.layers[0](x)) + other.rows


def hide(rank: int, size: int) -> tuple[str, str, float]:
    """(error of a packed batch in microbatches, error of another object, distance with one microbatch)."""

    def plan(stages: list[list[str]], count: int) -> ParallelPlan:
        rule = PipelineRule(stages=stages, microbatches=count, loss="batch")
        return ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)

    def built(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return kind()

    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    packed = pack_padded_sequence(x, torch.tensor([5, 4, 2, 1]), batch_first=True)
    told = []
    for model, batch in (
        (pipeline(built(Recurrent), plan([["rnn"], ["head"]], 2)), (packed,)),
        (pipeline(built(Held), plan([["layers.0"], ["layers.1"]], 2)), (x, Holder(x))),
    ):
        with pytest.raises(UnsupportedError) as error:
            model(*batch)
        told.append(str(error.value))
    many = pipeline(built(Held), plan([["layers.0"], ["layers.1"]], 1))
    difference = many(x, Holder(x)) - built(Held)(x, Holder(x))
    return told[0], told[1], float(difference.abs().max())


def test_rows_inside_objects_are_refused(rank_pool: RankPool) -> None:
    for packed, held, difference in rank_pool.run(2, hide, timeout=150):
        assert "contains a PackedSequence" in packed and "into 2 microbatches" in packed
        assert "pad_packed_sequence" in packed and "pipeline.microbatches to 1" in packed
        assert "contains a Holder" in held and "pass its tensors in a dict or a tuple" in held
        assert difference < 1e-6
