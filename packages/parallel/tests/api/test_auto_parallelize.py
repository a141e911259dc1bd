"""auto_parallelize: the first rank plans with an installed planner, and every rank applies its plan."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_models import batch_of, make, plan_of
from torch import nn

from meshwright_dtensor.errors import InfeasibleError, PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, PluginHost, hookimpl
from meshwright_dtensor.strategy import Planner, PlanRequest
from meshwright_dtensor.testing.on_device import random_state
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import auto_parallelize, parallelize, shard_loader


class Unsendable(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


class Toy(Planner):
    """Gives every rank to dp, and draws random numbers."""

    name = "toy"

    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        assert dist.get_rank() == 0
        assert all(type(value) is torch.Tensor for value in batch.values())
        torch.rand(3)
        if request.global_batch_size == 13:
            raise Unsendable(("lock", 13))
        if request.memory_limit is not None:
            raise InfeasibleError(f"nothing fits in {request.memory_limit} bytes")
        return [plan_of(degrees={"dp": request.world_size or 1, "tp": request.tp or 1})]


@hookimpl
def meshwright_planners() -> Any:
    yield PlannerSpec(name="toy", target="toy_plugin:Toy")


def host_with_toy() -> PluginHost:
    module = ModuleType("toy_plugin")
    module.meshwright_planners = meshwright_planners  # type: ignore[attr-defined]
    module.Toy = Toy  # type: ignore[attr-defined]
    sys.modules["toy_plugin"] = module
    points = [("toy", "toy_plugin"), ("parallel", "meshwright_parallel.plugin")]
    return PluginHost.build([EntryPoint(name, value, "meshwright") for name, value in points])


def planned(rank: int, world_size: int) -> Any:
    host = host_with_toy()
    model = make()
    state = random_state()
    assert auto_parallelize(model, batch_of(), planner="toy", plugins=host) is model
    assert torch.equal(random_state(), state)
    loss = model(**batch_of())
    torch.testing.assert_close(loss.full_tensor(), make()(**batch_of()))
    sharded = next(iter(shard_loader([batch_of()])))  # on all ranks, while one of them plans
    auto_parallelize(make(), sharded, planner="toy", plugins=host)
    with pytest.raises(
        InfeasibleError, match="nothing fits in 7 bytes"
    ):  # on every rank, not only on the first
        auto_parallelize(make(), batch_of(), planner="toy", memory_limit=7, plugins=host)
    with pytest.raises(RuntimeError, match=r"Unsendable: .*13"):  # the others do not wait for it
        auto_parallelize(make(), batch_of(), planner="toy", global_batch_size=13, plugins=host)
    with pytest.raises(PluginError, match="did you mean 'toy'"):
        auto_parallelize(make(), batch_of(), planner="tyo", plugins=host)
    with pytest.raises(UsageError, match="precision"):
        auto_parallelize(make(), batch_of(), planner="toy", precision="int3", plugins=host)
    with pytest.raises(UsageError, match="axis 'pp'"):
        auto_parallelize(make(), batch_of(), planner="toy", pp=2, plugins=host)
    with pytest.raises(TypeError):
        auto_parallelize(make(), batch_of(), plannr="toy", plugins=host)  # type: ignore[call-arg]
    return dict(model.parallel_plan.degrees)


def planned_where_one_rank_lacks_a_plugin(rank: int, world_size: int) -> list[str]:
    whole = host_with_toy()
    lacking = PluginHost.build([EntryPoint("parallel", "meshwright_parallel.plugin", "meshwright")])
    mine = whole if rank == 0 else lacking
    bare = whole if rank == 0 else PluginHost.build([])
    heard = []
    for call in (
        lambda: auto_parallelize(make(), batch_of(), planner="toy", plugins=mine),
        lambda: parallelize(make(), plan_of(degrees={"dp": 2}), plugins=bare),
    ):
        with pytest.raises(PluginError) as raised:
            call()
        heard.append(str(raised.value))
    return heard


@pytest.mark.slow
def test_missing_plugin_on_one_rank_raises_on_all(rank_pool: RankPool) -> None:
    here, there = rank_pool.run(2, planned_where_one_rank_lacks_a_plugin)
    assert here == there  # not: one rank fails, the other waits for ever
    assert "planner 'toy'" in here[0] and "but not on rank 1" in here[0]
    assert "strategy 'data'" in here[1] and "but not on rank 1" in here[1]


def installed_where_one_rank_turned_one_off(rank: int, world_size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("MESHWRIGHT_DISABLE_PLUGINS", "meshwright-parallel")
        with pytest.raises(PluginError) as raised:
            parallelize(make(), plan_of(degrees={"dp": 2}))
        return str(raised.value)


def test_installed_plugins_are_compared_first(rank_pool: RankPool) -> None:
    here, there = rank_pool.run(2, installed_where_one_rank_turned_one_off)
    assert here == there
    assert "strategy 'data'" in here and "MESHWRIGHT_DISABLE_PLUGINS" in here


def test_auto_parallelize(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, planned) == [{"dp": 2, "tp": 1}] * 2
