"""Sums of gradients over several axes: what they cross, held against the ranks that meet."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from planner_models import DGX_H100, DataLike, Mlp, TensorLike, host_of

from meshwright_dtensor.cluster import Cluster, LinkLevel
from meshwright_dtensor.cluster.cluster import merge_axes
from meshwright_dtensor.strategy import Link, PlanRequest, SearchRequest, StrategyCost
from meshwright_planner import EagerPlanner
from meshwright_planner.simulation.replay import simulate


class Summing(DataLike):
    gradient: ClassVar = "deferred"

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        return super().cost(
            replace(request, step=replace(request.step, backward_seconds=0.0)), degree, link
        )  # nothing hides


class Sharing(TensorLike):
    """Ranks that share the work of a row and, like those of cp, its gradients."""

    name, axis, order = "sharing", "cp", 20
    placement_search: ClassVar[bool] = False
    gradient: ClassVar = "deferred"


class Between(TensorLike):
    name, axis, order = "between", "bp", 15
    placement_search: ClassVar[bool] = False


HOST = host_of(Summing, Between, Sharing)


@pytest.mark.parametrize("degrees", [{"dp": 2, "cp": 8}, {"dp": 2, "bp": 2, "cp": 4}, {"dp": 4, "cp": 4}])
def test_sum_over_joined_axes_has_the_simulated_seconds(degrees: dict[str, int]) -> None:
    with torch.device("meta"):
        model, x = Mlp(4096, 8192), torch.empty(64, 4096)
    world = math.prod(degrees.values())
    dp, cp, between = degrees["dp"], degrees["cp"], degrees.get("bp", 1)
    request = PlanRequest(cluster=DGX_H100, world_size=world, dp=dp, cp=cp, degrees={"bp": between})
    plan = EagerPlanner(HOST).plan(model, (x,), request)[0]
    assert plan.predicted is not None and plan.predicted.split is not None
    (use,) = plan.collectives
    assert use.axis == "dp+cp"
    # one card a node could carry the sum of the outer axis alone, in eight times as long
    spans = [(8, 2), (1, cp)] if between > 1 else [(1, 16)]
    once = DGX_H100.running(world).link_over(spans).seconds("all_reduce", use.nbytes, dp * cp)
    assert plan.predicted.split.exposed["dp+cp"] == pytest.approx(once)
    assert simulate(plan, DGX_H100, host=HOST).seconds == pytest.approx(plan.predicted.step_seconds)


def test_axes_with_nothing_between_them_are_one() -> None:
    assert merge_axes([(8, 2), (1, 8)]) == ((1, 16),)
    assert merge_axes([(8, 2), (4, 1), (1, 4)]) == ((8, 2), (1, 4))
    assert merge_axes([(4, 1)]) == ((1, 1),)
    assert DGX_H100.link_over([(8, 2), (1, 8)]) == DGX_H100.link(1, 16)
    apart = DGX_H100.link_over([(8, 2), (1, 4)])
    assert apart.levels == ("nvlink", "infiniband") and apart.members == 4
    assert DGX_H100.link_over([(4, 2), (1, 2)]).levels == ("nvlink",)


@pytest.mark.parametrize("sizes", [(0, (8, 4)), (6, ()), (8, ()), (4, ())])
@pytest.mark.parametrize("shape", [(2, 2, 4), (3, 2, 2), (2, 4, 3), (4, 3, 2)])
def test_smallest_group_of_joined_axes(
    shape: tuple[int, int, int], sizes: tuple[int, tuple[int, ...]]
) -> None:
    """Of the ranks that differ on the first and last axis alone, as counted one by one."""
    level = LinkLevel("node", sizes[0], 0.0, 100.0, sizes[1])
    world = math.prod(shape)
    first, between, last = shape
    bounds = level.groups(world)
    node = {r: next(n for n, bound in enumerate(bounds[1:]) if r < bound) for r in range(world)}
    fewest = first * last
    for middle in range(between):
        ranks = [(a * between + middle) * last + b for a, b in itertools.product(range(first), range(last))]
        fewest = min(fewest, *Counter(node[r] for r in ranks).values())
    cluster = Cluster("lab", 8, 1, {"float32": 1.0}, 1.0, (level, LinkLevel("network", 0, 0.0, 1.0)), "")
    link = cluster.running(world).link_over([(between * last, first), (1, last)])
    assert link.members == (1 if fewest == first * last else fewest)
    assert link.name == ("node" if fewest == first * last else "network")
