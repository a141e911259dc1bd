"""Private torch names that end what torch remembers of meshes and groups."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _redistribute, debug


def forget_meshes() -> None:
    """Empty DTensor's caches of sharding decisions and of ways to redistribute: they hold the meshes, and so the
    process groups, that they were made with, and hand them out again for an equal mesh whose groups are new.
    """
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def forget_failed_join() -> None:
    """Let the next default group have its usual name, by which ranks find each other, where making one has failed.

    torch counts the groups of a process, and starts over only when a default group is destroyed; a rank whose peer left
    while it joined would wait for its peers under another name for ever.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0
