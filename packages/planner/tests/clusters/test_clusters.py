"""Clusters as data: the named ones, a user's own file, uneven groups, crowded machines, algorithms by size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_models import HOST, Transformer, eager, manual, tokens

from meshwright_dtensor.cluster import Cluster, LinkLevel, MeasuredCollective, MeasuredWork, SlowNode
from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner import explain
from meshwright_planner.clusters.file import read, write
from meshwright_planner.clusters.registry import (
    DGX_H100,
    FOLDER,
    LAPTOP_CPU,
    PROFILES,
    cluster_of,
    named,
)
from meshwright_planner.simulation.faults import parse_straggler

OVERSUBSCRIBED = replace(LAPTOP_CPU, cores=2, crowding=((1, 1.0), (2, 1.2), (4, 2.4)))

NVLINK = {"name": "nvlink", "size": 8, "latency_s": 2e-6, "bandwidth_Bps": 450e9}
INFINIBAND = {"name": "infiniband", "size": 0, "latency_s": 5e-6, "bandwidth_Bps": 50e9}


def test_profiles_have_a_source_and_round_trip(tmp_path: Path) -> None:
    assert {name for name, _ in PROFILES.values()} == {f.stem for f in FOLDER.glob("*.json")}
    for name, _ in PROFILES.values():
        cluster = named(name)
        assert (cluster.name == name and "datasheet" in cluster.source) or name == "laptop-cpu"
        write(cluster, tmp_path / "own.json")
        assert read(tmp_path / "own.json") == cluster
    assert {"p3.16xlarge", "mi300x", "dgx-b200", "dgx-h200"} <= {name for name, _ in PROFILES.values()}


def test_measured_machine_round_trips_and_loads_by_path(tmp_path: Path) -> None:
    work = (MeasuredWork("matmul", "float32", ((1e3, 1e-5), (1e6, 1e-4)), ((1e3, 2e-5), (1e6, 2e-4))),)
    moved = (MeasuredCollective("all_reduce", 2, ((1e3, 1e-4), (1e6, 1e-3)), 4),)
    measured = replace(OVERSUBSCRIBED, name="mine", work=work, collectives=moved, hides_communication=False)
    write(measured, tmp_path / "mine.json")
    assert cluster_of(str(tmp_path / "mine.json"), HOST) == measured


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"memory_bandwidth": -1}, "memory_bandwidth"),
        ({"bandwidth": 1}, "bandwidth"),
        ({"links": []}, "links"),
        ({"flops": {"bfloat16": 1e12}}, "float32"),
        ({"slow_nodes": [{"node": 1, "link": "nvlnk", "share": 0.5}]}, "nvlnk.*there are nvlink, infiniband"),
        ({"slow_nodes": [{"node": 1, "share": 0.5}]}, "share=0.5.* is of no link"),
        ({"slow_nodes": [{"node": -1}]}, "slow_nodes.0.node"),
        ({"slow_nodes": [{"node": 1, "compute": 0.5}]}, "slow_nodes.0.compute"),
        ({"links": [{**NVLINK, "sizes": [4, 2]}, INFINIBAND]}, "up to 4 ranks.*devices_per_node is 8"),
        ({"devices_per_node": 4}, "devices_per_node is 4, and 'nvlink' joins 8 ranks"),
        ({"links": [{**NVLINK, "size": 2}, INFINIBAND]}, "devices_per_node is 8, and 'nvlink' joins 2 ranks"),
        ({"links": [NVLINK, {**INFINIBAND, "name": "nvlink"}]}, "two levels have the same name"),
        (
            {"links": [NVLINK, {**INFINIBAND, "size": 12}, {**INFINIBAND, "name": "spine"}]},
            "begins at rank 12",
        ),
        (
            {"links": [NVLINK, {**INFINIBAND, "size": 10**15 + 4}, {**INFINIBAND, "name": "spine"}]},
            r"begins at rank 10{14}4, inside .*\(those begin at 0, 8, 16, 24, ",
        ),
        ({"reserved_bytes": 10**12}, "reserved_bytes is 1000000000000, and memory_bytes .*: nothing is left"),
        (
            {"links": [{n: v for n, v in NVLINK.items() if n != "size"}, INFINIBAND]},
            "'nvlink' has neither size nor sizes",
        ),
        ({"work": [{"kind": "matmul", "dtype": "float32", "forward": [[2, 1], [1, 1]]}]}, "ascend"),
    ],
)
def test_error_of_a_wrong_file_names_the_field(tmp_path: Path, change: dict[str, object], told: str) -> None:
    data = json.loads((FOLDER / "dgx-h100.json").read_text()) | change
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=told):
        cluster_of(str(tmp_path / "wrong.json"), HOST)
    with pytest.raises(UsageError, match=r"none\.json.*meshwright calibrate"):
        cluster_of("none.json", HOST)


@pytest.mark.parametrize(("size", "sizes"), [(0, ()), (3, ()), (5, (2, 5, 1)), (4, (4,)), (9, (1, 9))])
def test_groups_of_a_level_begin_where_it_says(size: int, sizes: tuple[int, ...]) -> None:
    level = LinkLevel("link", size, 1e-6, 1e9, sizes)
    starts = level.groups(40)[:-1]
    assert [rank for rank in range(40) if level.begins_at(rank)] == starts
    if sizes:
        assert starts[: len(sizes) + 1] == [sum(sizes[:n]) for n in range(len(sizes) + 1)]


def test_binary_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_bytes(b"\xff\xfe{\0")
    with pytest.raises(
        UsageError, match=r"wrong\.json' is no text in UTF-8 \(byte 0 is 0xff\); give a JSON file"
    ):
        cluster_of(str(tmp_path / "wrong.json"), HOST)


def test_path_is_accepted_and_number_rejected(tmp_path: Path) -> None:
    write(DGX_H100, tmp_path / "own.json")
    assert cluster_of(tmp_path / "own.json", HOST) == DGX_H100
    (planned,) = eager().plan(
        Transformer(layers=1), tokens(), PlanRequest(cluster=tmp_path / "own.json", world_size=1)
    )
    assert planned.provenance.cluster == "dgx-h100"
    with pytest.raises(
        UsageError, match=r"cluster=8 is of type int; give the name .* the path .* a Cluster, or None"
    ):
        eager().plan(Transformer(layers=1), tokens(), PlanRequest(cluster=8))  # type: ignore[arg-type]


def test_level_with_sizes_needs_no_size(tmp_path: Path) -> None:
    uneven = {n: v for n, v in NVLINK.items() if n != "size"} | {"sizes": [8, 4]}
    data = json.loads((FOLDER / "dgx-h100.json").read_text()) | {"links": [uneven, INFINIBAND]}
    (tmp_path / "uneven.json").write_text(json.dumps(data))
    result = cluster_of(str(tmp_path / "uneven.json"), HOST)
    assert result.links[0].groups(16) == [0, 8, 12, 16] and result.links[0].size == 8
    write(result, tmp_path / "again.json")
    assert cluster_of(str(tmp_path / "again.json"), HOST) == result


@pytest.mark.parametrize("outer", [{"size": 8}, {"size": 8, "sizes": (8, 4)}])
def test_more_ranks_than_the_links_join_are_rejected(outer: dict[str, Any]) -> None:
    alone = replace(DGX_H100, links=(replace(DGX_H100.links[0], **outer),))
    assert alone.most_ranks == 8 and alone.running(8).link(1, 8).name == "nvlink"
    assert DGX_H100.most_ranks is None
    told = r"world_size=12, and the links of cluster 'dgx-h100' join 8 ranks at most \(level 'nvlink'\)"
    with pytest.raises(UsageError, match=told):
        eager().plan(Transformer(layers=1), tokens(rows=12), PlanRequest(cluster=alone, world_size=12))
    with pytest.raises(InfeasibleError) as caught:  # nor are more named as what would fit
        eager().plan(
            Transformer(layers=1), tokens(), PlanRequest(cluster=alone, world_size=8, memory_limit=1000)
        )
    assert "world_size=16" not in str(caught.value)


def test_a_small_collective_takes_the_tree_and_a_large_one_over_nodes_the_hierarchy() -> None:
    link = DGX_H100.link(1, 512)
    small, large = (link.algorithms("all_reduce", nbytes, 512) for nbytes in (1e3, 1e10))
    assert min(small, key=lambda a: small[a]) in ("tree", "hierarchical") and small["ring"] > small["tree"]
    for sizes, nbytes in ((small, 1e3), (large, 1e10)):
        assert link.seconds("all_reduce", nbytes, 512) == min(sizes.values())
    inner_link = DGX_H100.link(1, 8)
    assert set(inner_link.algorithms("all_gather", 1e6, 8)) == {"ring"}
    assert (
        inner_link.algorithms("all_reduce", 1e9, 8)["ring"]
        < inner_link.algorithms("all_reduce", 1e9, 8)["tree"]
    )
    # 64 nodes, each card sends its eighth over its own network: by hand
    inner = 8.4e-6 + 7 * 3.4e-6 + 7 / 8 * 1e10 / 370.8e9
    ring, tree = 2 * (63 * 1.4e-5 + 63 / 64 * 1.25e9 / 48.5e9), 2 * (6 * 1.4e-5 + 1.25e9 / 48.5e9)
    outer = 8.4e-6 + min(ring, tree)
    assert large["hierarchical"] == pytest.approx(2 * inner + outer)


def test_a_group_that_straddles_uneven_nodes_pays_the_network() -> None:
    levels = (LinkLevel("fast", 6, 0.0, 100.0), LinkLevel("slow", 0, 0.0, 1.0))
    uneven = Cluster("six", 6, 1, {"float32": 1.0}, 1.0, levels, "").running(12)
    assert uneven.link(1, 2).name == "fast" and uneven.link(1, 3).name == "fast"
    assert uneven.link(1, 4).name == "slow"  # ranks 4 to 7 are in two nodes
    assert uneven.running(4).link(1, 4).name == "fast"  # one group, in one node
    mixed = replace(uneven, links=(replace(levels[0], sizes=(4, 2, 4)), levels[1])).running(10)
    assert mixed.link(1, 2).name == "fast" and mixed.link(1, 4).name == "slow"
    assert mixed.link(1, 10).bandwidth_Bps == 2.0  # two cards in the smallest node


def test_ranks_that_share_cores_slow_each_other() -> None:
    assert OVERSUBSCRIBED.running(1).rate("float32") == OVERSUBSCRIBED.rate("float32")
    assert OVERSUBSCRIBED.running(2).rate("float32") == pytest.approx(OVERSUBSCRIBED.rate("float32") / 1.2)
    assert OVERSUBSCRIBED.running(3).launch_s == pytest.approx(OVERSUBSCRIBED.launch_s * 1.8)
    assert OVERSUBSCRIBED.running(8).streams == pytest.approx(OVERSUBSCRIBED.streams / 4.8)
    assert OVERSUBSCRIBED.running(4).running(2) == OVERSUBSCRIBED.running(2).running(2)
    assert DGX_H100.running(4096).rate("bfloat16") == DGX_H100.rate("bfloat16")


def test_measurements_replace_the_link_model() -> None:
    points = ((1e3, 1e-4), (1e5, 1e-3))
    measured = tuple(
        MeasuredCollective("all_reduce", 2, tuple((n, s * ranks) for n, s in points), ranks)
        for ranks in (2, 4)
    )
    cluster = replace(OVERSUBSCRIBED, collectives=measured)
    assert cluster.running(2).link(1, 2).seconds("all_reduce", 1e4, 2) == pytest.approx(2 * 10**-3.5)
    assert cluster.running(4).link(1, 2).seconds("all_reduce", 10, 2) == pytest.approx(4e-4)
    assert cluster.running(4).link(1, 4).seconds("all_reduce", 1e6, 4) == pytest.approx(4e-2 * 1.5)
    # what was not measured: the start, a hop and the bytes
    assert cluster.running(2).link(1, 2).seconds("all_gather", 1e6, 2) == pytest.approx(550e-6 + 5e5 / 1e9)


def test_waiting_rank_leaves_its_core_to_others() -> None:
    assert DGX_H100.running(8).shared_core_factors(4) == ()
    assert OVERSUBSCRIBED.running(2).shared_core_factors(2) == (1 / 1.2, 1.0)
    assert (
        replace(OVERSUBSCRIBED, crowding=((1, 1.0), (2, 1.0))).running(2).shared_core_factors(2) == ()
    )  # a core each
    assert OVERSUBSCRIBED.running(4).shared_core_factors(4) == pytest.approx((1 / 2.4, 0.5, 0.75, 1.0))
    assert OVERSUBSCRIBED.running(4).shared_core_factors(2) == pytest.approx((0.5, 1.0))  # two ranks each
    assert (
        OVERSUBSCRIBED.running(2 * OVERSUBSCRIBED.devices_per_node).shared_core_factors(2) == ()
    )  # a machine each


def planned(
    cluster: Cluster | str, ranks: int, planner: str = "eager", length: int = 32, **pins: int
) -> ParallelPlan:
    request = PlanRequest(cluster=cluster, world_size=ranks, **pins)  # type: ignore[arg-type]
    result = (eager() if planner == "eager" else manual()).plan(
        Transformer(layers=2), tokens(rows=48, length=length), request
    )
    return result[0]


def test_reports_name_crossed_links() -> None:
    plan = planned(DGX_H100, 16, tp=8)
    report = explain(plan, cluster=DGX_H100.running(16))
    assert report.to_dict()["plans"][0]["links"] == {"dp": ["infiniband"], "tp": ["nvlink"]}
    text = str(report)
    assert "in all, over nvlink" in text and "in all, over infiniband" in text
    whole = planned(DGX_H100, 16, dp=16)
    assert "in all, over nvlink and infiniband" in str(explain(whole, cluster=DGX_H100.running(16)))
    assert "over nvlink" not in str(explain(plan)) and explain(plan).to_dict()["plans"][0]["links"] == {}


def test_plan_for_nodes_of_uneven_size(tmp_path: Path) -> None:
    """Two nodes of eight and two of four: an axis of eight straddles them and pays the network, one of four does not."""
    data = json.loads((FOLDER / "dgx-h100.json").read_text())
    data |= {"name": "mixed", "links": [{**NVLINK, "size": 8, "sizes": [8, 4]}, INFINIBAND]}
    (tmp_path / "mixed.json").write_text(json.dumps(data))
    mixed = read(tmp_path / "mixed.json")
    assert mixed.nodes(24) == [0, 8, 12, 16, 20, 24]
    wide, narrow = (planned(str(tmp_path / "mixed.json"), 24, tp=degree) for degree in (8, 4))
    crossed = [explain(plan, cluster=mixed.running(24)).plans[0].links["tp"] for plan in (wide, narrow)]
    assert crossed == [("nvlink", "infiniband"), ("nvlink",)]
    even = planned(DGX_H100, 24, tp=8)
    assert wide.predicted is not None and even.predicted is not None
    assert wide.predicted.split is not None and even.predicted.split is not None
    assert wide.predicted.split.exposed["tp"] > 1.2 * even.predicted.split.exposed["tp"]
    faults = parse_straggler("node2=1.2", mixed.running(24), 24)
    assert [fault.rank for fault in faults] == [12, 13, 14, 15]
    with pytest.raises(UsageError, match="no such node among 24 ranks; give 0 to 4"):
        parse_straggler("node5=1.2", mixed.running(24), 24)
    free = planned(str(tmp_path / "mixed.json"), 24, length=4096)
    assert free.degree("tp") <= 4


def test_slow_node_delays_its_groups(tmp_path: Path) -> None:
    slow = (SlowNode(1, 1.5), SlowNode(2, link="infiniband", share=0.25))
    cluster = replace(DGX_H100, slow_nodes=slow)
    write(cluster, tmp_path / "slow.json")
    assert read(tmp_path / "slow.json") == cluster
    assert cluster.running(8) == replace(DGX_H100.running(8), slow_nodes=slow)  # on the first node alone
    two, three = cluster.running(16), cluster.running(24)
    assert two.rate("bfloat16") == pytest.approx(DGX_H100.rate("bfloat16") / 1.5)
    assert two.link(8, 2).bandwidth_Bps == 48.5e9 and three.link(8, 3).bandwidth_Bps == 48.5e9 / 4
    assert three.link(1, 8).bandwidth_Bps == DGX_H100.link(1, 8).bandwidth_Bps
    for ranks in (8, 16, 24):
        again, once = cluster.running(24).running(ranks), cluster.running(ranks)
        assert again.streams == pytest.approx(once.streams) and again.link(8, 2) == once.link(8, 2)
    sound, held = planned(DGX_H100, 16, dp=16), planned(str(tmp_path / "slow.json"), 16, dp=16)
    assert sound.predicted is not None and held.predicted is not None
    assert held.predicted.compute_seconds == pytest.approx(1.5 * sound.predicted.compute_seconds)
    notes = "\n".join(held.provenance.notes)
    assert "node 1 computes 1.5 times as long: all ranks" in notes and "node 2" not in notes
    assert "node 1" not in "\n".join(planned(str(tmp_path / "slow.json"), 8).provenance.notes)
    weak = planned(str(tmp_path / "slow.json"), 24, dp=24)
    assert "node 2 has 25% of infiniband" in "\n".join(weak.provenance.notes)


def test_measured_links_are_not_slowed_twice(tmp_path: Path) -> None:
    measured = MeasuredCollective("all_reduce", 2, ((1e3, 1e-4), (1e6, 1e-3)), 2)
    cluster = replace(
        LAPTOP_CPU, collectives=(measured,), slow_nodes=(SlowNode(0, link="loopback", share=0.5),)
    )
    write(cluster, tmp_path / "twice.json")
    with pytest.raises(UsageError, match="were measured, slow node and all"):
        read(tmp_path / "twice.json")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"node": -1}, "node=-1.*from 0"),
        ({"node": True}, "node=True.*from 0"),
        ({"node": 0, "compute": 0.5}, "compute=0.5.*1 or more"),
        ({"node": 0, "compute": float("nan")}, "compute=nan.*1 or more"),
        ({"node": 0, "link": "infiniband", "share": 0.0}, "share=0.0.*more than 0"),
        ({"node": 0, "link": "infiniband", "share": 2}, "share=2.*1 at most"),
        ({"node": 0, "share": 0.5}, "share=0.5.*of no link"),
        ({"node": 0, "link": "infinband", "share": 0.5}, "'infinband'; there are nvlink, infiniband"),
    ],
)
def test_wrong_slow_nodes_are_rejected_without_a_file(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(DGX_H100, slow_nodes=(SlowNode(**wrong),))


def test_an_axis_with_one_rank_in_a_node_does_not_cross_its_links() -> None:
    slow = replace(
        DGX_H100, links=(replace(DGX_H100.links[0], bandwidth_Bps=1e9), *DGX_H100.links[1:])
    ).running(64)
    between, within = slow.link(8, 8), slow.link(1, 64)
    assert between.levels == ("infiniband",) and between.bandwidth_Bps == DGX_H100.links[1].bandwidth_Bps
    assert within.levels == ("nvlink", "infiniband") and within.bandwidth_Bps == 1e9
