"""A rank makes the process groups of a mesh that it is in, however many ranks there are."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor._torch.groups import new_mesh
from meshwright_dtensor.mesh.mesh import group_over
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool, fake_group

AXES = ("dp", "zero", "cp", "tp")


def made(world: int, by_torch: bool = False) -> tuple[int, list[tuple[str, list[int]]]]:
    """How many groups a rank asks torch for, and the names and ranks of those that it is in."""
    sizes = (world // 16, 4, 1, 4)
    with fake_group(world, world // 2 + 1), patch.object(dist, "new_group", wraps=dist.new_group) as new:
        with patch("torch.distributed.device_mesh.new_group", new):
            mesh = (
                new_mesh(device_type(), sizes, AXES)
                if not by_torch
                else init_device_mesh(device_type(), sizes, mesh_dim_names=AXES)
            )
            groups = [mesh.get_group(axis) for axis in AXES]
            if not by_torch:
                groups += [group_over(mesh, axes) for axes in (("dp", "zero"), ("dp", "tp"))]
        return new.call_count, [(g.group_name, dist.get_process_group_ranks(g)) for g in groups]


def test_as_many_groups_are_made_in_a_world_of_thousands() -> None:
    (few, _), (many, _) = made(64), made(4096)
    assert few == many == len(AXES) + 2


def test_groups_have_the_names_and_ranks_that_torch_gives_them() -> None:
    """The negative control: torch asks for a group of every row of ranks along an axis."""
    _, groups = made(64)
    torch_count, torch_groups = made(64, by_torch=True)
    assert groups[: len(AXES)] == torch_groups and torch_count == 64 + 3 * 16
    assert sorted(len(ranks) for _, ranks in groups) == [1, 4, 4, 4, 16, 16]


def sums_over_axes(rank: int, size: int) -> list[list[float]]:
    """Sums of rank numbers over the axes of two meshes, one made after the other is gone."""
    results = []
    for sizes in ((2, 1, 2), (1, 4, 1)):
        mesh = new_mesh(device_type(), sizes, ("a", "b", "c"))
        for axes in (("a",), ("b",), ("c",), ("a", "c")):
            value = torch.tensor([float(rank)])
            dist.all_reduce(value, group=group_over(mesh, axes))
            results.append([value.item(), *map(float, dist.get_process_group_ranks(group_over(mesh, axes)))])
    return results


def test_groups_of_real_ranks_sum_over_their_axes(rank_pool: RankPool) -> None:
    results = rank_pool.run(4, sums_over_axes)
    for rank, sums in enumerate(results):
        for total, *ranks in sums:
            assert total == sum(ranks) and rank in ranks
        row, column = divmod(rank, 2)
        assert [ranks for _, *ranks in sums] == [
            [column, column + 2], [rank], [2 * row, 2 * row + 1], [0, 1, 2, 3], [rank], [0, 1, 2, 3], [rank], [rank]
        ]  # fmt: skip


@pytest.mark.parametrize("world", [16, 64])
def test_a_mesh_of_torch_still_makes_all_its_groups(world: int) -> None:
    """Only meshes of this framework are made so: other ranks may take part in those of users."""
    made(world)
    with fake_group(world), patch("torch.distributed.device_mesh.new_group", wraps=dist.new_group) as new:
        init_device_mesh(device_type(), (world // 4, 4), mesh_dim_names=("a", "b"))
        assert new.call_count == 4 + world // 4
