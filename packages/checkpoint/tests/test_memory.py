"""Memory beside the model: a snapshot for a save that goes on behind, little for one that is waited for, little for a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright_checkpoint import load, save
from meshwright_dtensor.testing import RankPool

COUNT, ROWS = 16, 2048
PART = 4 * ROWS * ROWS // 2
HELD = COUNT * PART


def sharded(dim: int, value: float) -> Any:
    """128 MiB a rank, in parts of 8 MiB."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shape = [ROWS, ROWS]
    shape[dim] //= 2
    model = torch.nn.ParameterDict()
    for number in range(COUNT):
        local = torch.full(shape, value + number)
        model[f"w{number}"] = torch.nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
        )
    return model


def resident(kind: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{kind}:"))


def extra(work: Any) -> int:
    """Most memory during `work`, beside what there was before."""
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def takes(rank: int, size: int, folder: str) -> list[int]:
    model, other = sharded(0, 1.0), sharded(1, -1.0)
    save(f"{folder}/step-0", model=torch.nn.Linear(8, 8), asynchronous=False)  # what the first save imports
    waited = extra(lambda: save(f"{folder}/step-1", model=model, asynchronous=False))
    behind = extra(lambda: save(f"{folder}/step-2", model=model).wait())
    same = extra(lambda: load(f"{folder}/step-2", model=model))
    across = extra(lambda: load(f"{folder}/step-2", model=other))
    assert all(bool((p.to_local() == number + 1).all()) for number, p in enumerate(other.values()))
    return [waited, behind, same, across]


def test_memory_is_bounded(rank_pool: RankPool, tmp_path: Path) -> None:
    for waited, behind, same, across in rank_pool.run(2, takes, str(tmp_path)):
        assert waited < HELD // 2
        assert behind < HELD + (64 << 20)
        assert same < HELD // 2
        assert across < 96 << 20  # a buffer for each thread
