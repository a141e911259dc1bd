"""Deferred initialisation of a 1 GB model on four real ranks needs the memory of the shards, not of the
model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred, local_values
from meshwright_dtensor.sharding.boxes import chunk_box, slice_of
from meshwright_dtensor.testing.rank_pool import RankPool

# Shapes of the weights, by layer; together 1 GB. Every rank keeps a quarter of the rows.
SHAPES = [(8192, 4096)] * 6 + [(10240, 4096), (2560, 4096)]
MODEL_BYTES = sum(rows * columns * 4 for rows, columns in SHAPES)
GB = 1e9


def anonymous_bytes() -> int:
    """Memory of this process that only swap could hold: RssAnon of proc(5)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak(threading.Thread):
    """Samples anonymous memory every millisecond until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.peak = 0
        self.samples = 0

    def run(self) -> None:
        while not self.stopped.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())
            self.samples += 1


def build(shapes: list[tuple[int, int]]) -> nn.Module:
    """Linear weights, then an embedding, then a weight whose initialiser makes temporaries larger than itself."""
    *linear, embedding, last = shapes
    model = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in linear))
    model.append(nn.Embedding(*embedding))
    model.append(nn.Linear(last[1], last[0], bias=False))
    nn.init.trunc_normal_(model[-1].weight, std=0.02, a=-0.08, b=0.08)
    return model


@dataclass
class Measured:
    """Bytes of anonymous memory above the start: the most while building, the most in all, and in the end."""

    building: int
    peak: int
    final: int
    samples: int
    rows: torch.Tensor


def keep_a_quarter(rank: int, world_size: int, shapes: list[tuple[int, int]], deferred: bool) -> Measured:
    start = anonymous_bytes()
    sampler = Peak()
    sampler.start()
    with deferred_init() if deferred else nullcontext():
        model = build(shapes)
    building = sampler.peak
    assert is_deferred(model) == deferred
    for layer in model:
        box = chunk_box(layer.weight.shape, (world_size,), (rank,), (0,))
        layer.weight = nn.Parameter(local_values(layer.weight, box))
    sampler.stopped.set()
    sampler.join()
    assert not is_deferred(model)
    rows = model[0].weight.detach()[:2].clone()
    return Measured(building - start, sampler.peak - start, anonymous_bytes() - start, sampler.samples, rows)


@pytest.fixture(scope="module")
def fresh_pool() -> Iterator[RankPool]:
    with (
        RankPool() as pool
    ):  # not the session's: memory that its ranks have freed before would hide what is taken here
        yield pool


@pytest.mark.slow
def test_four_ranks_never_hold_the_model(fresh_pool: RankPool) -> None:
    results = fresh_pool.run(4, keep_a_quarter, SHAPES, True, timeout=300)
    torch.manual_seed(0)
    first = nn.Linear(4096, 8192, bias=False).weight.detach()
    assert MODEL_BYTES > GB
    for rank, seen in enumerate(results):
        print(
            f"rank {rank}: building {seen.building / GB:.3f} GB, peak {seen.peak / GB:.3f} GB, "
            f"in the end {seen.final / GB:.3f} GB, {seen.samples} samples"
        )
        assert seen.samples > 100
        assert seen.building < 0.06 * GB  # code and small things: no parameter, no temporary
        assert seen.peak < 0.35 * GB
        assert seen.final > MODEL_BYTES / 4
        assert torch.equal(seen.rows, slice_of(first, chunk_box(first.shape, (4,), (rank,), (0,)))[:2])


@pytest.mark.slow
def test_plain_initialisation_holds_all_of_it(fresh_pool: RankPool) -> None:
    """The negative control: the same measurement sees all of a smaller model when nothing is deferred."""
    (seen,) = fresh_pool.run(1, keep_a_quarter, SHAPES[-3:], False, timeout=300)
    print(f"plain: building {seen.building / GB:.3f} GB, peak {seen.peak / GB:.3f} GB")
    assert seen.building > sum(rows * columns * 4 for rows, columns in SHAPES[-3:])
