"""Contention of the ranks of one machine, and the time of their collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright_dtensor.cluster import CollectiveKind, MeasuredCollective
from meshwright_dtensor.devices import on_host
from meshwright_planner.calibration.operations import device, sync

SIZES = (2**10, 2**14, 2**17, 2**20, 2**23)
"""Bytes of the full tensor."""

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def crowding() -> tuple[float, float]:
    """Seconds of a small training step while all ranks compute, and on rank 0 while the others wait."""
    step = _step()
    step()
    solo = min(_timed(step) for _ in range(20)) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    # the median, since ranks share cores
    together = sorted(_timed(step) for _ in range(20))[10]
    dist.barrier()
    return together, solo


def _step(rows: int = 256) -> Callable[[], object]:
    """Matrix products and memory-bound operations, in the proportion of a small transformer."""
    x = torch.randn(rows, 128, device=device(), requires_grad=True)
    up, down = (torch.randn(*s, device=device(), requires_grad=True) for s in ((512, 128), (128, 512)))

    def step() -> object:
        out = x
        for _ in range(4):
            out = out + F.linear(F.silu(F.linear(F.layer_norm(out, (128,)), up)), down) * 0.01
        return torch.autograd.grad(out.sum(), [x, up, down])

    return step


def collectives(ranks: int, budget: float, sizes: Sequence[int] = SIZES) -> Iterator[MeasuredCollective]:
    """Every kind over every group size that divides `ranks`, all groups of that size at once.

    When communication uses the cores that compute, a collective between compute takes several times as long as collectives in a
    row: threads wait for a core, and ranks for each other. There each collective follows some compute, and its time is the time
    that it adds. `budget`: seconds for each size of each.
    """
    compute = _step(32) if on_host(device()) else None
    for degree in (d for d in range(2, ranks + 1) if ranks % d == 0):
        groups = [dist.new_group(list(range(low, low + degree))) for low in range(0, ranks, degree)]
        group = groups[dist.get_rank() // degree]
        assert group is not None
        for kind in KINDS:
            # a round trip
            ways = 2.0 if kind == "send_recv" else 1.0
            seconds = (_collective(_call(kind, n, degree, group), budget, compute) / ways for n in sizes)
            rising = zip(map(float, sizes), accumulate(seconds, max))
            yield MeasuredCollective(kind, degree, tuple(rising), ranks)


CHAIN, REPEATS = 5, 7
"""Pieces of compute in a chain, and how often chains are timed."""


def _collective(run: Callable[[], None], budget: float, compute: Callable[[], object] | None) -> float:
    """Seconds of `run`, or the seconds that it adds between compute: the mean over ranks of their medians."""
    run()
    dist.barrier()
    count = max(3, min(100, int(budget / max(_agreed(_timed(run)), 1e-6))))
    alone = _agreed(sorted(_timed(run) for _ in range(count))[count // 2])
    if compute is None:
        return alone

    def row(often: bool) -> None:
        """Pieces of compute, with `run` after each or after the last only: its wait cancels out in the difference."""
        for number in range(CHAIN):
            compute()
            if often or number == CHAIN - 1:
                run()

    pairs = [(_timed(partial(row, False)), _timed(partial(row, True))) for _ in range(REPEATS)]
    once, often = (sorted(times)[REPEATS // 2] for times in zip(*pairs))
    return max(alone, _agreed((often - once) / (CHAIN - 1)))


def _call(kind: str, nbytes: int, degree: int, group: Any) -> Callable[[], None]:
    whole = torch.zeros(max(degree, nbytes // 4) // degree * degree, device=device())
    part = torch.zeros(whole.numel() // degree, device=device())
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole.clone(), group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_single(torch.empty_like(whole), part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(torch.empty_like(part), whole, group=group)
    if kind == "all_to_all":
        parts = torch.zeros(max(1, part.numel() // degree) * degree, device=device())
        return lambda: dist.all_to_all_single(torch.empty_like(parts), parts, group=group)
    place, members = dist.get_rank(group), dist.get_process_group_ranks(group)

    # from each even member to the next, and back
    def passed() -> None:
        first, second = (dist.send, dist.recv) if place % 2 == 0 else (dist.recv, dist.send)
        if place ^ 1 < degree:
            first(whole, members[place ^ 1], group=group)
            second(whole, members[place ^ 1], group=group)

    return passed


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - start


def _agreed(seconds: float) -> float:
    """The mean over ranks, so that all make the same number of calls."""
    total = torch.tensor(seconds, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
