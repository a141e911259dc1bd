"""Marks on activations: nothing on one device, a redistribution on a mesh."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from meshwright_dtensor import distribute, mark_sharding
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.hints import observe_marks
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def marked(rank: int, world_size: int) -> None:
    plain = torch.randn(4, 6)
    assert mark_sharding(plain, {"tp": Shard(1)}) is plain
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    x = distribute(plain.clone().requires_grad_(), mesh, ["I", "X"])
    assert mark_sharding(x, {"tp": Replicate()}) is x  # X is replicated too
    assert mark_sharding(x, {"cp": Shard(0)}) is x  # an axis that the mesh does not have
    y = mark_sharding(x * 2, {"tp": Shard(-1)})
    assert y.global_layout.states == ("I", 1) and y.to_local().shape == (4, 3)
    assert torch.equal(y.full_tensor(), plain * 2)
    with pytest.raises(UnsupportedError, match="would be empty"):
        mark_sharding(distribute(torch.ones(1, 2), mesh, ["I", "I"]), {"tp": 0})


def test_marks_on_activations(rank_pool: RankPool) -> None:
    rank_pool.run(2, marked)


def test_observer_sees_marks() -> None:
    seen: list[dict[str, object]] = []
    x = torch.ones(2, 3)
    with observe_marks(lambda mark: seen.append({**mark})):
        mark_sharding(x, {"tp": Shard(-1), "dp": Replicate()})
        mark_sharding(torch.nn.Parameter(x), {"tp": 0})  # of parameters, which are asked for theirs
    mark_sharding(x, {"tp": 0})
    assert seen == [{"tp": 1, "dp": "I"}]
