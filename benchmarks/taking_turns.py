"""Configurations of one model that live on the same ranks and take turns, so that all of them see the same noise."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
from torch import nn

import meshwright as mw
from meshwright_dtensor.mesh.mesh import destroy_groups, live_process_groups
from meshwright_dtensor.plan import ParallelPlan

Step = Callable[[], float]
"""One step of a configuration that is set up: its seconds, from the last rank's begin to the last rank's end."""


def timed_pairs(steps: Sequence[Callable[[], object]], rounds: int) -> list[tuple[float, float]]:
    """Seconds of two contestants' steps, in turn, on ranks that wait for each other; the order within a pair changes."""
    results = []
    for round_ in range(rounds):
        seconds = [0.0, 0.0]
        for which in (0, 1) if round_ % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            steps[which]()
            dist.barrier()
            seconds[which] = time.perf_counter() - start
        results.append((seconds[0], seconds[1]))
    return results


def set_up(model: nn.Module, batch: dict[str, torch.Tensor], plan: ParallelPlan) -> Step:
    """A configuration, with AdamW."""
    model = mw.parallelize(model, plan, batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start

    return step


@contextmanager
def living_together(
    sides: Iterable[tuple[nn.Module, dict[str, torch.Tensor], ParallelPlan]],
) -> Iterator[list[Step]]:
    """Steps of configurations that are set up; they and their process groups end with the block."""
    before = live_process_groups()
    with _one_group_for_the_same_ranks():
        steps = [set_up(*side) for side in sides]
    try:
        yield steps
    finally:
        steps.clear()
        destroy_groups(live_process_groups() - before)
        gc.collect()  # groups that are still referred to keep their threads


@contextmanager
def _one_group_for_the_same_ranks() -> Iterator[None]:
    """Meshes that are made inside share their process groups, whose turns never overlap.

    Every group has a thread that wakes up a hundred times a second: on four ranks and two cores a step took 1.2 times as long
    with groups of eleven configurations, and 1.6 times with groups of 22, as alone.
    """
    make, stored = device_mesh.new_group, dict[tuple[int, ...], Any]()

    def new_group(ranks: Sequence[int], **options: Any) -> Any:
        if tuple(ranks) not in stored:
            stored[tuple(ranks)] = make(ranks=ranks, **options)
        return stored[tuple(ranks)]

    device_mesh.new_group = new_group
    try:
        yield
    finally:
        device_mesh.new_group = make
