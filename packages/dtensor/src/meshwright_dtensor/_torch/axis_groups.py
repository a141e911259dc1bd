"""Process groups of mesh axes: a rank makes only those that it is in.

For each axis of a mesh torch makes a group of every row of ranks along it, on every rank, which also notes those that it is not in.
A mesh of 16,384 ranks has 16,384 rows along an axis of one rank, and each takes a tenth of a millisecond on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

device_mesh: Any = dist.device_mesh
_Mesh: Any = device_mesh.DeviceMesh
_c10d: Any = dist.distributed_c10d


@contextmanager
def groups_of_this_rank() -> Iterator[None]:
    """Inside, meshes that are made or flattened make only the groups that this rank is in, with the names that torch gives them.

    All ranks must make the same meshes in the same order, as ever.
    """
    all_groups = _Mesh._init_one_process_group

    def own_group(layout: Any, rank_map: torch.Tensor, axis: str, override: tuple[Any, Any]) -> Any:
        backend, options = override
        world = _c10d._get_default_group()
        # one group of all ranks is the default group; with bound devices torch splits all rows of an axis in one call
        splits = getattr(world, "bound_device_id", None) is not None or device_mesh.dist_config.use_torchcomms
        if splits or layout.numel() == world.size():
            return all_groups(layout, rank_map, axis, override)
        rows = _rows(layout, rank_map)
        here = (rows == world.rank()).any(1).nonzero().flatten().tolist()
        names = _c10d._world.group_count
        _c10d._world.group_count += len(rows)
        if not here:
            return None
        with _named(str(names + here[0])):
            group = dist.new_group(
                rows[here[0]].tolist(),
                timeout=options._timeout if options else None,
                backend=backend,
                pg_options=options,
                group_desc=f"mesh_{axis}",
                # nothing waits for ranks outside of the group, which do not make it
                use_local_synchronization=True,
            )
        return group.group_name

    _Mesh._init_one_process_group = staticmethod(own_group)
    try:
        yield
    finally:
        _Mesh._init_one_process_group = staticmethod(all_groups)


def _rows(layout: Any, rank_map: torch.Tensor) -> torch.Tensor:
    """The ranks of every row along an axis, a row each."""
    rows: torch.Tensor = device_mesh._MeshLayout([layout]).remap_to_tensor(rank_map)
    return rows.reshape(-1, rows.shape[-1])


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside, a new group has this name. By itself a group of some ranks would have one made of those that each of them has."""
    before = _c10d._process_group_name
    _c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        _c10d._process_group_name = before
