"""Extra memory: a copy of the shards for a background save, little for a synchronous save, little for a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resident import extra, freed_goes_back
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright_checkpoint import load, prepare_save, save
from meshwright_checkpoint.saving import saving
from meshwright_dtensor.testing.rank_pool import RankPool

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


def takes(rank: int, size: int, folder: str) -> list[int]:
    freed_goes_back()
    model, other = sharded(0, 1.0), sharded(1, -1.0)
    save(f"{folder}/step-0", model=torch.nn.Linear(8, 8), asynchronous=False)  # what the first save imports
    waited = extra(lambda: save(f"{folder}/step-1", model=model, asynchronous=False))
    background = extra(lambda: save(f"{folder}/step-2", model=model).wait())
    saving._saver.cache_clear()  # and with it its memory
    prepared = extra(lambda: prepare_save(model, wait=True))
    first = extra(lambda: save(f"{folder}/step-3", model=model).wait())
    same = extra(lambda: load(f"{folder}/step-2", model=model))
    across = extra(lambda: load(f"{folder}/step-2", model=other))
    assert all(bool((p.to_local() == number + 1).all()) for number, p in enumerate(other.values()))
    return [waited, background, prepared, first, same, across]


@pytest.mark.slow
def test_save_and_load_memory_is_bounded(rank_pool: RankPool, tmp_path: Path) -> None:
    for waited, background, prepared, first, same, across in rank_pool.run(2, takes, str(tmp_path)):
        assert waited < 26 << 20  # two chunks of 8 MiB that are written
        assert HELD < background < HELD + (15 << 20)
        assert HELD <= prepared < HELD + (15 << 20)
        assert first < 15 << 20  # it finds all it needs
        assert same < 28 << 20  # three threads read 4 MiB each, around the system's cache
        assert across < 72 << 20  # 52 MiB of slots for both ranks of a machine, and what one reads into
