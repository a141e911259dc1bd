"""The profile of this machine from measurements on one rank and on each number of ranks."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.cluster import Chip, Cluster, LinkLevel, MeasuredCollective
from meshwright_dtensor.devices import default_device
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.process import usable_cores
from meshwright_planner.calibration import collectives as collectives_module
from meshwright_planner.calibration import host_overhead, operations
from meshwright_planner.calibration.operations import device
from meshwright_planner.clusters.local_machine import CPU
from meshwright_planner.clusters.registry import named
from meshwright_planner.trace.op_kinds import HEAD_WIDTHS, attention_kind

POINT_S = 0.02
"""Seconds for each measured point."""

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of several ranks: slowdown of compute, dispatch overhead of global tensors, and collectives."""

    ranks: int
    slower: float
    dispatch_s: float
    collectives: tuple[MeasuredCollective, ...]

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> RankMeasurements:
        """What `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        measured = ({**m, "points": tuple(map(tuple, m["points"]))} for m in data.pop("collectives"))
        return RankMeasurements(**data, collectives=tuple(MeasuredCollective(**m) for m in measured))


def measure_one_rank(name: str) -> Cluster:
    """The measurements of one rank; links need two."""
    record = default_device()
    accelerated = not record.on_host
    top, room = (4e12, 2**31) if accelerated else (5e9, 2**27)
    curves = []
    operations.settle()
    entry = operations.entry(POINT_S)

    def add(kind: str, dtype: torch.dtype, cases: Iterator[operations.Case]) -> None:
        curves.append(operations.measured(kind, dtype, cases, POINT_S, entry))

    for dtype in DTYPES:
        add("matmul", dtype, operations.products(dtype, top))
        for width in HEAD_WIDTHS:
            add(attention_kind(width), dtype, operations.attentions(width, dtype, top / 4))
    for kind in operations.KINDS:
        add(kind, torch.float32, operations.streams(kind, torch.float32, room))
    curves += [operations.views(POINT_S), operations.updates(POINT_S, 4.0 * room)]
    curves.append(operations.thin(POINT_S, entry, curves[0]))
    pages = None if accelerated else operations.fresh(POINT_S, room)
    curves += [] if pages is None else [pages]
    forward, back = operations.launches(POINT_S)
    rates = {c.dtype: max(size / time for size, time in c.forward) for c in curves if c.kind == "matmul"}
    chip: Chip | None = None
    memory, machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), platform.machine()
    machine += f", {usable_cores()} cores, {torch.get_num_threads()} thread(s) for each rank"
    if accelerated:
        told, machine = record.free_and_total(0), record.chip()
        if told is None:
            raise UsageError(
                f"torch does not say how much memory {machine} ({record.name}) has, and a profile needs it; let the plugin of the "
                "device answer free_and_total"
            )
        memory = told[1]
        processor = record.processor()
        chip = None if processor is None else Chip(*processor)
    single, half = rates["float32"], rates["bfloat16"]
    cluster = Cluster(
        name=name,
        devices_per_node=record.count() if accelerated else 64,
        memory_bytes=memory,
        flops={"float32": single, "float64": single / 2, "float16": half, "bfloat16": half},
        memory_bandwidth=operations.bandwidth(room),
        links=named(CPU).links,
        source=f"measured by meshwright calibrate: {machine}, torch {torch.__version__}",
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        launch_s=forward,
        launch_backward_s=back,
        update_s=next(m for m in curves if m.kind == "update").forward[0][1],
        hides_launch=accelerated,
        hides_communication=accelerated,
        fused_attention=record.attention is not None and accelerated,
        cores=0 if accelerated else usable_cores(),
        work=tuple(curves),
        chip=chip,
    )
    return replace(cluster, host_s=host_overhead.host(cluster))


def measure_ranks(
    lay: Callable[[nn.Module, torch.Tensor], nn.Module],
    budget: float = POINT_S,
    sizes: Sequence[int] = collectives_module.SIZES,
) -> RankMeasurements:
    """The measurements of all ranks of the running job; equal on all ranks.

    `lay`: applies data parallelism over the ranks; `budget`: seconds for each point; `sizes`: bytes of the full tensors of the
    measured collectives.
    """
    ranks = dist.get_world_size()
    contended, single = collectives_module.crowding()
    dispatched = host_overhead.laid(ranks, lay)
    collectives = tuple(collectives_module.collectives(ranks, budget, sizes))
    mine = torch.tensor([contended, single, dispatched], dtype=torch.float64, device=device())
    dist.all_reduce(mine)
    # only rank 0 ran alone
    contended, single, dispatched = (float(x) for x in mine)
    slower = max(1.0, contended / ranks / single)
    return RankMeasurements(ranks, slower, dispatched / ranks, collectives)


def combined_profile(cluster: Cluster, parts: Sequence[RankMeasurements]) -> Cluster:
    """The profile of the machine by one rank and by each number of ranks; without a second, the links stay as assumed."""
    if not parts:
        return cluster
    parts = sorted(parts, key=lambda part: part.ranks)
    several, links = [part for part in parts if part.ranks > 1], cluster.links
    if several:
        sent = next(m.points for m in several[0].collectives if m.kind == "send_recv")
        links = (LinkLevel("loopback", 0, sent[0][1], sent[-1][0] / sent[-1][1]),)
    slower = accumulate((part.slower for part in several), max, initial=1.0)
    crowding = [(ranks, round(most, 4)) for ranks, most in zip((1, *(p.ranks for p in several)), slower)]
    return replace(
        cluster,
        links=links,
        source=cluster.source if several else f"{cluster.source}; links are not measured, with one rank",
        crowding=tuple(crowding),
        dispatch_s=min(part.dispatch_s for part in parts),
        collectives=tuple(m for part in parts for m in part.collectives),
        memory_bytes=cluster.memory_bytes // parts[-1].ranks if cluster.cores else cluster.memory_bytes,
    )
