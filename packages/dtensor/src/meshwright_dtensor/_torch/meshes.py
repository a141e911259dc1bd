"""Clears torch's private caches of meshes and process groups."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _redistribute, debug


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding propagation and redistribution.

    They keep meshes alive with their process groups, and return them for an equal mesh whose groups are new.
    """
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def forget_failed_join() -> None:
    """Reset torch's count of groups after a failed start-up, so that the next default group has its usual name.

    torch resets the count only when a default group is destroyed.  Without this, a rank whose peer left during start-up
    would wait for its peers under another name for ever.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0
