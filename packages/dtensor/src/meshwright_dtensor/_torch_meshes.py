"""Private torch names that end what DTensor remembers of meshes."""

from __future__ import annotations

from torch.distributed.tensor import _redistribute, debug


def forget_meshes() -> None:
    """Empty DTensor's caches of sharding decisions and of ways to redistribute: they hold the meshes, and so the
    process groups, that they were made with, and hand them out again for an equal mesh whose groups are new.
    """
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
