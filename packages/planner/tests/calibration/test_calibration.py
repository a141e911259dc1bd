"""Measuring a machine: curves that rise, profiles that come back as they were, plans made with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from planner_models import LAPTOP_CPU, Mlp, eager
from torch import nn

from meshwright_dtensor.cluster import Cluster, MeasuredWork
from meshwright_dtensor.cluster.links import interpolated
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_planner.calibration import host_overhead, operations, profile
from meshwright_planner.calibration.profile import RankMeasurements
from meshwright_planner.clusters.file import read, write
from meshwright_planner.cost.operations import even_bytes, optimizer_seconds

FEW = 2e-3  # seconds for each point


class Twice(nn.Module):
    """Stands for a model over a mesh: its part of the rows, and as much work again."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.model(x[: self.rows])
        out: torch.Tensor = self.model(x[: self.rows])
        return out


def lay(model: nn.Module, batch: torch.Tensor) -> nn.Module:
    return Twice(model, len(batch) // dist.get_world_size())


def measured_together(rank: int, size: int, path: str) -> None:
    result = profile.measure_ranks(lay, FEW, (2**10, 2**14))
    if rank == 0:
        result.save(Path(path))


def small_profile() -> Cluster:
    """A machine, by a few points only."""
    curves = (
        operations.measured("matmul", torch.float32, operations.products(torch.float32, 1e6), FEW),
        operations.measured(
            "pointwise", torch.float32, operations.streams("pointwise", torch.float32, 2e5), FEW
        ),
        operations.views(FEW),
        operations.updates(FEW, 4e5),
    )
    return replace(LAPTOP_CPU, cores=2, hides_launch=False, hides_communication=False, work=curves)


def test_curves_rise_for_every_kind() -> None:
    for kind in operations.KINDS:
        curve = operations.measured(kind, torch.float32, operations.streams(kind, torch.float32, 2e5), FEW)
        for points in (curve.forward, curve.backward):
            sizes, seconds = zip(*points, strict=True)
            assert list(sizes) == sorted(set(sizes)) and list(seconds) == sorted(seconds) and seconds[0] > 0
    forward, back = operations.launches(FEW)
    assert 0 < forward < 1e-3 and 0 < back < 1e-3


def test_interpolation_and_extrapolation_of_curves() -> None:
    points = ((1e2, 1e-5), (1e4, 1e-3))
    assert interpolated(points, 1.0) == 1e-5
    assert interpolated(points, 1e3) == pytest.approx(1e-4)
    assert interpolated(points, 1e6) == pytest.approx(1e-1)


@pytest.mark.slow
def test_profile_of_several_ranks_is_usable(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, measured_together, str(tmp_path / "part.json"))
    part = RankMeasurements.load(tmp_path / "part.json")
    assert part.slower >= 1.0 and part.dispatch_s >= 0.0
    kinds = {m.kind for m in part.collectives}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
    cluster = profile.combined_profile(small_profile(), [part])
    assert cluster.crowding[0] == (1, 1.0) and cluster.crowding[1][0] == 2
    write(cluster, tmp_path / "machine.json")
    assert read(tmp_path / "machine.json") == cluster
    request = PlanRequest(cluster=str(tmp_path / "machine.json"), world_size=2, top_k=9)
    plans = eager().plan(Mlp(), torch.randn(4, 64), request)
    assert all(p.predicted is not None and p.predicted.step_seconds > 0 for p in plans)
    link = cluster.running(2).link(1, 2)
    reduced = next(m for m in part.collectives if m.kind == "all_reduce" and m.degree == 2)
    assert link.seconds("all_reduce", 2**14, 2) == reduced.points[-1][1]


def test_plan_costs_use_measured_curves() -> None:
    """With ten times longer products the same plan takes longer, and what crowds a machine slows all of it."""
    cluster = small_profile()
    slow = replace(
        cluster,
        work=tuple(
            replace(m, forward=tuple((n, 10 * s) for n, s in m.forward)) if m.kind == "matmul" else m
            for m in cluster.work
        ),
    )

    def seconds(of: Cluster) -> float:
        plan = eager().plan(Mlp(), torch.randn(4, 64), PlanRequest(cluster=of, world_size=1))[0]
        assert plan.predicted is not None
        return plan.predicted.compute_seconds

    assert seconds(slow) > 1.5 * seconds(cluster)
    two = replace(cluster, crowding=((1, 1.0), (2, 2.0))).running(2)
    assert two.measured("matmul", "float32") == MeasuredWork(
        "matmul",
        "float32",
        tuple((n, 2 * s) for n, s in cluster.work[0].forward),
        tuple((n, 2 * s) for n, s in cluster.work[0].backward),
    )


def test_an_optimizer_step_counts_its_parameters() -> None:
    curve = MeasuredWork("update", "float32", ((100.0, 1e-5), (1e6, 1e-3)), ())
    cluster = replace(LAPTOP_CPU, work=(curve,))
    assert optimizer_seconds(cluster, 1000.0, 2, 100) == pytest.approx(100 * 1e-5)
    assert optimizer_seconds(cluster, 1000.0, 0, 100) == pytest.approx(100 * 1e-5 * 3 / 7)
    plain = replace(LAPTOP_CPU, update_s=1e-5)
    assert optimizer_seconds(plain, 7.0, 2, 10) == pytest.approx(1e-4, rel=1e-4)


@pytest.mark.slow
def test_one_rank_measures_all_but_links(rank_pool: RankPool, tmp_path: Path) -> None:
    """A machine with one device has a profile too, and says what is missing."""
    rank_pool.run(1, measured_together, str(tmp_path / "part.json"))
    part = RankMeasurements.load(tmp_path / "part.json")
    assert part.ranks == 1 and not part.collectives and part.dispatch_s >= 0
    alone = small_profile()
    cluster = profile.combined_profile(alone, [part])
    assert cluster.links == alone.links and cluster.crowding == ((1, 1.0),)
    assert "links are not measured" in cluster.source
    assert eager().plan(Mlp(), torch.randn(4, 64), PlanRequest(cluster=cluster, world_size=1))[0].predicted


def test_host_overhead_is_the_step_time_beyond_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured on a step of a given length; priced once for each operation."""
    count, predicted = host_overhead.recorded(LAPTOP_CPU)
    assert count > 100 and predicted > 0
    monkeypatch.setattr(host_overhead, "step_seconds", lambda model, x: predicted + count * 5e-6)
    assert host_overhead.host(LAPTOP_CPU) == pytest.approx(5e-6)
    plain = replace(LAPTOP_CPU, hides_launch=False)
    (_, before), (_, after) = (host_overhead.recorded(replace(plain, host_s=s)) for s in (0.0, 5e-6))
    assert after - before == pytest.approx(count * 5e-6)


def test_dispatch_overhead_is_the_added_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count, _ = host_overhead.recorded(LAPTOP_CPU)
    laid: list[object] = []

    def seconds(model: object, x: torch.Tensor) -> float:
        return 1e-3 + (count * 2e-6 if model in laid else 0.0)

    def lay(model: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module:
        assert x.shape[0] == 6  # two rows for each of three ranks
        laid.append(model)
        return model

    monkeypatch.setattr(host_overhead, "step_seconds", seconds)
    assert host_overhead.laid(3, lay) == pytest.approx(2e-6)


def test_backward_timing_excludes_the_autograd_call() -> None:
    cases = list(operations.streams("pointwise", torch.float32, 2e4))
    with_call, without = (
        operations.measured("pointwise", torch.float32, iter(cases), FEW, e) for e in (0.0, 1.0)
    )
    assert without.backward[0][1] < with_call.backward[0][1] / 2


def test_results_are_kept_alive_during_timing() -> None:
    """As autograd keeps them; of many, the last ones."""
    x = torch.randn(64)
    seen: list[int] = []

    def run() -> torch.Tensor:
        out = x * 2
        seen.append(out.data_ptr())
        return out

    turn = operations._turns([run], 3, operations.KEPT_BYTES // 4)
    assert len(set(seen)) == 4  # room for so many, filled before anything is timed
    seen.clear()
    turn()
    assert len(set(seen)) == 3
    seen.clear()
    operations._turns([run], 3, operations.KEPT_BYTES // 4, most=2)
    assert len(seen) == 2


def test_kept_bytes_include_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is one number, and holds the probabilities of all classes: a thousand of those would fill a machine."""
    kept: list[int] = []
    turns = operations._turns

    def watched(actions: list[Callable[[], object]], count: int, made: int, most: int) -> Callable[[], None]:
        kept.append(made)
        return turns(actions, count, made, most)

    monkeypatch.setattr(operations, "_turns", watched)
    x = torch.randn(256, 512)
    operations._times(operations.stream("softmax", x), FEW)
    assert min(kept) >= x.numel() * 4


def test_thin_products_take_longer() -> None:
    """Few rows and a large weight: beyond what equal sides move, by what was measured; equal sides as before."""
    even = MeasuredWork("matmul", "float32", ((1.0, 1e-6),), ((1.0, 2e-6),))
    thin = MeasuredWork("thin", "float32", ((1e6, 1e-3),), ((1e6, 2e-3),))
    plain = replace(LAPTOP_CPU, hides_launch=False, memory_bandwidth=1e15, work=(even,))

    def longer(rows: int, width: int) -> float:
        seconds = []
        for cluster in (plain, replace(plain, work=(even, thin))):
            model = nn.Linear(64, width, bias=False)
            result = eager().plan(
                model, torch.randn(rows, 64, requires_grad=True), PlanRequest(cluster=cluster, world_size=1)
            )[0]
            assert result.predicted is not None
            seconds.append(result.predicted.compute_seconds)
        return seconds[1] - seconds[0]

    assert longer(64, 64) == 0.0
    moved = 4.0 * (4 * 64 + 64 * 4096 + 4 * 4096)
    more = moved - even_bytes(2.0 * 4 * 64 * 4096)
    assert 0 < more < moved and longer(4, 4096) == pytest.approx(more / 1e6 * (1e-3 + 2e-3))


def test_a_batch_of_even_products_is_not_thin() -> None:
    flops = 64 * 2.0 * 32**3
    assert even_bytes(flops, 4, 64) == pytest.approx(64 * even_bytes(2.0 * 32**3))
    assert even_bytes(flops, 4, 64) >= 4 * 64 * 3 * 32**2 > even_bytes(flops)
    assert even_bytes(flops, 2, 64) == even_bytes(flops, 4, 64) / 2


def test_thin_product_overhead_is_measured() -> None:
    even = MeasuredWork("matmul", "float32", ((1.0, 1e-18),), ((1.0, 1e-18),))
    result = operations.thin(FEW, 0.0, even, (4, 16, 4096))
    ((nbytes, forward),), ((_, back),) = result.forward, result.backward
    assert 0 < nbytes < 4.0 * (4 * 16 + 16 * 4096 + 4 * 4096) and forward > 0 and back > 0
    slow = MeasuredWork("matmul", "float32", ((1.0, 1.0),), ((1.0, 1.0),))
    assert operations.thin(FEW, 0.0, slow, (4, 16, 4096)).forward[0][1] == 0.0
