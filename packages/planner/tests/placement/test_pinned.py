"""A few marked parameters: the planner keeps to them and arranges the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planner_models import DGX_H100, LAPTOP_CPU, Mlp, Transformer, eager, tokens
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.hints import mark_sharding
from meshwright_dtensor.strategy import PlanRequest


def placed(model: nn.Module, batch: Any, cluster: Cluster = LAPTOP_CPU, **options: Any) -> dict[str, str]:
    """Pattern -> state on tp, at tp 2."""
    request = PlanRequest(cluster=cluster, world_size=2, tp=2, dp=1, **options)
    return {rule.pattern: rule.placement["tp"] for rule in eager().plan(model, batch, request)[0].parameters}


def test_one_mark_changes_the_whole_mlp() -> None:
    model, batch = Mlp(), (torch.randn(8, 64),)
    free = placed(model, batch)
    assert free == {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}
    assert mark_sharding(model.up.weight, {"tp": Shard(-1)}) is model.up.weight
    # the partial results of `up` are summed: its bias is replicated, and `down` stays sharded along its input
    assert placed(model, batch) == {"up.weight": "S(1)", "down.weight": "S(1)"}
    assert placed(model, batch, keep_user_sharding=False) == free


def test_mark_on_one_layer_holds_for_its_copies() -> None:
    model, batch = Transformer(layers=2, hidden=128), tokens(rows=4)
    free = placed(model, batch, DGX_H100)
    assert free["layers.*.attention.q.weight"] == "S(0)" and free["layers.*.attention.o.weight"] == "S(1)"
    mark_sharding(model.layers[1].attention.q.weight, {"tp": Replicate()})
    mark_sharding(model.layers[0].mlp.up.weight, {"tp": Shard(0)})
    placement = placed(model, batch, DGX_H100)
    assert "layers.*.attention.q.weight" not in placement
    for name in ("mlp.up.weight", "mlp.up.bias", "mlp.down.weight"):
        assert placement[f"layers.*.{name}"] == free[f"layers.*.{name}"]
    mark_sharding(model.layers[0].attention.q.weight, {"tp": Shard(0)})
    with pytest.raises(UsageError, match="mark them alike"):
        placed(model, batch, DGX_H100)


def test_impossible_marks_are_rejected() -> None:
    model, batch = Mlp(), (torch.randn(8, 64),)
    with pytest.raises(UnsupportedError, match="2-D"):
        mark_sharding(model.up.weight, {"tp": Shard(2)})
    with pytest.raises(UsageError, match="Replicate"):
        mark_sharding(model.up.weight, {"tp": Partial()})
    mark_sharding(model.up.weight, {"dp": Shard(0)})
    with pytest.raises(UsageError, match=r"axis 'dp', where placements are not searched"):
        placed(model, batch)
    odd = Mlp(inner=63)
    mark_sharding(odd.up.weight, {"tp": Shard(0)})
    with pytest.raises(UsageError, match="cannot"):
        placed(odd, batch)


def test_error_names_all_names_of_a_tied_parameter() -> None:
    model = Transformer(layers=2, hidden=128)
    model.head.weight = model.embed.weight
    mark_sharding(model.head.weight, {"dp": Shard(0)})
    with pytest.raises(UsageError, match=r"'embed.weight' \(tied to 'head.weight'\) is marked"):
        placed(model, tokens(rows=4))


class MarkedMlp(Mlp):
    """Marks an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = mark_sharding(self.up(x), {"tp": Shard(-1), "cp": Shard(1)})
        return self.down(F.gelu(inner))


def test_marks_of_activations_are_named_as_neither_planned_nor_predicted() -> None:
    model, batch = Transformer(layers=6), tokens(rows=8)
    for layer in model.layers:
        layer.mlp = MarkedMlp(64, 256)
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=4, tp=2, dp=2)
    (plan,) = eager().plan(model, batch, request)
    (note,) = [note for note in plan.provenance.notes if "mark_sharding" in note]
    assert (
        "it is moved to tp S(2) at run time" in note and "nor the prediction include" in note
    )  # there is no cp
    assert all(f"layers.{n}.mlp" in note for n in (0, 1)) and "and 2 more" in note
    (alone,) = eager().plan(model, batch, replace(request, tp=1, dp=4))
    (unmarked,) = eager().plan(Transformer(layers=6), batch, request)
    for other in (alone, unmarked):
        assert "mark_sharding" not in "".join(other.provenance.notes)
