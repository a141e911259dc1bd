"""Products and attention by shape: bounds, tiles, waves, and products that others measured."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright_dtensor.cluster import Chip, Cluster, MeasuredWork, Operation, Protocol
from meshwright_dtensor.cluster.links import Link
from meshwright_planner.clusters.file import read, write
from meshwright_planner.clusters.registry import DGX_A100, DGX_H100, LAPTOP_CPU, PROFILES, named
from meshwright_planner.cost.operations import timed
from meshwright_planner.cost.products import Product, attention_seconds, product_seconds

DEVICES = [named(name) for name, _ in PROFILES.values() if name != "laptop-cpu"]

# products a batch, rows, columns, depth, TFLOP/s in bf16 on an H100 (OpenXLA, xla/service/gpu/model/matmul_interpolator_data.h)
H100 = (
    (1, 4096, 4096, 1024, 677), (1, 2048, 4096, 4096, 754), (1, 2048, 2048, 4096, 738), (1, 1024, 1024, 4096, 470),
    (1, 4096, 256, 4096, 376), (1, 1024, 4096, 2048, 634), (1, 2048, 512, 4096, 451), (4, 1024, 2048, 4096, 744),
    (2, 2048, 4096, 4096, 779), (4, 2048, 4096, 512, 607), (2, 256, 1024, 4096, 295), (4, 4096, 256, 4096, 622),
    (1, 4096, 256, 256, 85), (1, 4096, 512, 256, 142), (1, 4096, 1024, 256, 223), (1, 4096, 2048, 256, 308),
    (1, 4096, 4096, 256, 399), (1, 4096, 256, 512, 145), (1, 4096, 512, 512, 240), (1, 4096, 1024, 512, 355),
    (1, 4096, 2048, 512, 450), (1, 4096, 4096, 512, 552), (1, 4096, 256, 1024, 229), (1, 4096, 512, 1024, 378),
    (1, 4096, 1024, 1024, 498), (1, 4096, 2048, 1024, 605), (1, 4096, 4096, 1024, 685), (1, 4096, 256, 2048, 314),
    (1, 4096, 512, 2048, 531), (1, 4096, 1024, 2048, 644), (1, 4096, 2048, 2048, 727), (1, 4096, 4096, 2048, 736),
    (1, 4096, 256, 4096, 399), (1, 4096, 512, 4096, 662), (1, 4096, 1024, 4096, 752), (1, 4096, 2048, 4096, 759),
    (1, 4096, 4096, 4096, 780),
)  # fmt: skip


FILL = Chip(1, 1).fill_s


def seconds(cluster: Cluster, *product: int) -> float:
    return product_seconds(cluster, Product(*product), "bfloat16")


def random_products(count: int) -> list[Product]:
    dice = random.Random(0)
    sizes = [1, 8, 63, 64, 65, 128, 500, 1024, 4096, 5120, 16384, 65536]
    return [
        Product(dice.choice(sizes), dice.choice(sizes), dice.choice(sizes), dice.choice((1, 16)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("cluster", DEVICES, ids=lambda c: c.name)
def test_no_product_beats_the_roofline(cluster: Cluster) -> None:
    for product in random_products(200):
        rows, columns, depth, count, itemsize = product
        took = product_seconds(cluster, product, "float16")
        flops = 2.0 * rows * columns * depth * count
        moved = itemsize * count * (rows * depth + depth * columns + rows * columns)
        assert 0 < flops / (took * cluster.flops["float16"]) <= cluster.compute_efficiency
        assert took >= max(flops / cluster.rate("float16"), moved / cluster.streams)


def test_a_larger_product_never_takes_less_time() -> None:
    for product in random_products(200):
        for field in ("rows", "columns", "depth", "batch"):
            larger = product._replace(**{field: getattr(product, field) * 2})
            assert product_seconds(DGX_A100, larger, "bfloat16") >= product_seconds(
                DGX_A100, product, "bfloat16"
            )


def test_one_column_past_a_tile_costs_a_tile() -> None:
    whole, past = seconds(DGX_H100, 16384, 1024, 4096), seconds(DGX_H100, 16384, 1025, 4096)
    assert past > 1.05 * whole
    # as many operations for each second as any other multiple of the tiles
    assert seconds(DGX_H100, 16384, 2048, 4096) < 2.1 * whole


def test_one_tile_past_a_wave_costs_a_wave() -> None:
    chip = Chip(100, 50 * 2**20, tiles=((128, 128),))
    cluster = replace(DGX_H100, chip=chip)
    full, past = seconds(cluster, 1280, 1280, 8192), seconds(cluster, 1281, 1280, 8192)
    assert past - FILL == pytest.approx(2 * (full - FILL), rel=1e-3)


def test_few_tiles_split_the_depth() -> None:
    alone = seconds(DGX_H100, 512, 512, 65536)
    assert alone < 0.5 * 512 * 512 * 65536 * 2 / (DGX_H100.rate("bfloat16") * 16 / 132)


def test_a_thin_product_runs_at_the_pace_of_the_memory() -> None:
    took = seconds(DGX_H100, 8, 16384, 16384)
    assert took == pytest.approx(FILL + 2.0 * (8 * 16384 * 2 + 16384**2) / DGX_H100.streams, rel=0.01)


def test_products_that_others_measured() -> None:
    alone = replace(DGX_H100, compute_efficiency=0.803)
    errors, shallow = [], []
    for count, rows, columns, depth, tflops in H100:
        # their time has the launch
        took = seconds(alone, rows, columns, depth, count) + 3e-6
        errors.append(abs(2e-12 * rows * columns * depth * count / took / tflops - 1))
        if depth <= 512 and rows * columns >= 2**23:
            # results that take as long to write as to compute
            shallow.append(errors[-1])
    assert statistics.mean(errors) < 0.06 and max(errors) < 0.2
    assert len(shallow) == 5 and max(shallow) < 0.04
    # a rate that knows no shape is off where there are few tiles
    flat = [abs(0.803 * 989 / tflops - 1) for *_, tflops in H100]
    assert statistics.mean(flat) > 0.3


def test_attention_by_width_length_and_waves() -> None:
    def rate(heads: int, length: int, width: int) -> float:
        flops = 2.0 * heads * length * length * width
        return flops / attention_seconds(DGX_H100, (1, heads, length, width), flops, "bfloat16")

    assert rate(32, 8192, 128) > rate(32, 8192, 64) > rate(32, 8192, 32)
    assert rate(32, 8192, 128) > rate(32, 512, 128) > rate(1, 512, 128)
    assert rate(32, 16384, 256) <= DGX_H100.rate("bfloat16")
    assert rate(132, 4096, 128) == pytest.approx(0.44 * DGX_H100.rate("bfloat16"), rel=0.01)


def linear(cluster: Cluster, rows: int, columns: int, depth: int) -> float:
    nbytes = 2.0 * (rows * depth + columns * depth + rows * columns)
    op = Operation(
        "linear", "matmul", "bfloat16", 2.0 * rows * columns * depth, nbytes, True, 2, (2.0 * rows * columns,),
        outputs=((rows, columns),), itemsize=2,
    )  # fmt: skip
    return timed(cluster, op)[0]


def test_the_backward_pass_has_its_own_shapes() -> None:
    forward = seconds(DGX_H100, 16384, 128, 4096)
    back = seconds(DGX_H100, 16384, 4096, 128) + seconds(DGX_H100, 4096, 128, 16384)
    assert linear(DGX_H100, 16384, 128, 4096) == pytest.approx(forward + back)


def test_a_measured_curve_is_scaled_to_the_shape() -> None:
    curve = MeasuredWork("matmul", "bfloat16", ((1e9, 1e-5), (1e13, 2e-2)), ((1e9, 2e-5), (1e13, 4e-2)))
    shaped, plain = replace(DGX_H100, work=(curve,)), replace(DGX_H100, work=(curve,), chip=None)
    assert linear(shaped, 4096, 4096, 4096) == pytest.approx(linear(plain, 4096, 4096, 4096), rel=0.05)
    assert linear(shaped, 65536, 64, 16384) > 1.5 * linear(plain, 65536, 64, 16384)


def test_clusters_without_a_chip_know_no_shape() -> None:
    assert LAPTOP_CPU.chip is None
    same = {linear(LAPTOP_CPU, *sizes) for sizes in itertools.permutations((64, 4096, 8192))}
    assert max(same) == pytest.approx(min(same))


def test_the_fastest_protocol_counts() -> None:
    low, high = Protocol(5e-6, 1e-6, 0.4), Protocol(1e-5, 4e-6, 1.0)
    link = Link("nvlink", 2e-6, 4e11, protocols=(low, high))
    assert link.seconds("all_gather", 1024, 8) == pytest.approx(5e-6 + 7e-6 + 1024 * 7 / 8 / 1.6e11)
    assert link.seconds("all_gather", 1e9, 8) == pytest.approx(1e-5 + 28e-6 + 1e9 * 7 / 8 / 4e11)
    bandwidths = [n / link.seconds("all_reduce", n, 8) for n in (2.0**k for k in range(10, 34))]
    assert bandwidths == sorted(bandwidths) and bandwidths[-1] * 2 * 7 / 8 <= 4e11


def test_hops_inside_of_a_node_are_short() -> None:
    inside = Link("nvlink", 2e-6, 4e11, protocols=(Protocol(0.0, 1e-6),))
    link = Link("network", 5e-6, 4e11, inside, 8, 5e10, protocols=(Protocol(0.0, 1e-5),))
    # 1 of 8 hops crosses the network
    assert link.algorithms("all_gather", 8.0, 64)["ring"] == pytest.approx(63 * (1e-5 + 7e-6) / 8, rel=1e-3)


@pytest.mark.parametrize("cluster", [DGX_H100, LAPTOP_CPU], ids=lambda c: c.name)
def test_a_file_keeps_chip_and_protocols(cluster: Cluster, tmp_path: Path) -> None:
    write(cluster, tmp_path / "cluster.json")
    assert read(tmp_path / "cluster.json") == cluster


def test_every_device_names_its_sources() -> None:
    for cluster in DEVICES:
        assert cluster.chip is not None and "multiprocessors" in cluster.source
        constants = ("compute_efficiency", "memory_efficiency", "attention_efficiency")
        chosen = (cluster.compute_efficiency, cluster.memory_efficiency, cluster.chip.attention_efficiency)
        for name, value, usual in zip(constants, chosen, (0.6, 0.8, 1.0)):
            assert value == usual or f"{name}:" in cluster.source, (cluster.name, name)
