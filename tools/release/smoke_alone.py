"""Runs inside of a fresh environment: `smoke_alone.py PACKAGE`. The package imports, every module of it, and does its job once.

A module may need an extra that is not installed: then the import that fails has to name a distribution of an extra.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODULES = {"yaml": "pyyaml"}
"""Import name -> distribution, where they differ."""


def optional(distribution: str) -> set[str]:
    """The distributions that only extras of `distribution` bring."""
    lines = importlib.metadata.requires(distribution) or []
    return {match[0] for line in lines if "extra ==" in line and (match := re.match(r"[\w.-]+", line))}


def import_all(package: str) -> int:
    """Import every module of a package; the number of modules."""
    root, names = importlib.import_module(package), [package]
    left_out = optional(package.replace("_", "-"))
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        try:
            importlib.import_module(module.name)
            names.append(module.name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if MODULES.get(missing, missing) not in left_out:
                raise
    return len(names)


def dtensor() -> None:
    """A plan survives its JSON; a sum on two ranks."""
    from meshwright_dtensor import ParallelPlan
    from meshwright_dtensor.testing.rank_pool import RankPool

    plan = ParallelPlan(world_size=2, degrees={"dp": 2}, strategies={"dp": "data"})
    assert ParallelPlan.from_json(plan.to_json()) == plan
    with RankPool() as pool:
        first, second = pool.run(2, distributed)
    assert first == second


def distributed(rank: int, world_size: int) -> float:
    """The norm of a gradient of a sharded product."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from meshwright_dtensor import distribute

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    values = torch.arange(12.0).view(4, 3)
    whole = values.clone().requires_grad_()
    whole.square().sum().backward()
    sharded = distribute(values, mesh, [Shard(0)]).requires_grad_()
    sharded.square().sum().backward()
    assert whole.grad is not None and sharded.grad is not None
    assert torch.equal(sharded.grad.full_tensor(), whole.grad)
    return float(whole.grad.norm())


def parallel() -> None:
    """One step on two ranks, with the gradients of one device."""
    from meshwright_dtensor.testing.rank_pool import RankPool

    with RankPool() as pool:
        assert all(pool.run(2, verified))


def verified(rank: int, world_size: int) -> bool:
    """Whether a plan of data parallelism is one device."""
    import torch
    from torch import nn

    from meshwright_dtensor import ParallelPlan
    from meshwright_parallel import verify

    plan = ParallelPlan(world_size=world_size, degrees={"dp": world_size}, strategies={"dp": "data"})
    report = verify(
        lambda: nn.Linear(8, 8), torch.randn(4, 8), plan, steps=1, loss=lambda y: y.square().mean()
    )
    return bool(report.ok)


def planner() -> None:
    """A plan for one device; without strategies there is no other."""
    import torch
    from torch import nn

    from meshwright_planner import plan

    answer = plan(nn.Linear(8, 8), torch.zeros(4, 8), world_size=1, cluster="dgx-h100")
    assert answer.predicted is not None and answer.predicted.step_seconds > 0  # type: ignore[union-attr]


def pipeline() -> None:
    """The schedules that are registered can run."""
    from meshwright_dtensor.plugins import discover
    from meshwright_dtensor.schedule import Shape
    from meshwright_dtensor.schedule.registry import schedule_named
    from meshwright_dtensor.schedule.timetable import timetable

    for name in discover().schedules():
        schedule = schedule_named(name)
        stages = 2 * schedule.stages_each
        assert timetable(schedule, Shape(2, stages, 4 * schedule.stages_each)).length > 0


def checkpoint() -> None:
    """Save and load."""
    import torch
    from torch import nn

    from meshwright_checkpoint import load, save

    with tempfile.TemporaryDirectory() as folder:
        model, other = nn.Linear(3, 5), nn.Linear(3, 5)
        save(Path(folder) / "step-1", model=model).wait()
        load(Path(folder) / "step-1", model=other)
        assert torch.equal(model.weight, other.weight)


def meshwright() -> None:
    """The API in one import."""
    import meshwright as mw

    assert all(getattr(mw, name) is not None for name in mw.__all__)


def main(package: str) -> None:
    job: Callable[[], None] = globals()[package.rpartition("_")[2]]
    count = import_all(package)
    job()
    print(f"{package}: {count} modules imported, and it works")


if __name__ == "__main__":
    main(sys.argv[1])
