"""The profile of this machine from measurements on one rank and on each number of ranks."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.cluster import Cluster, LinkLevel, MeasuredCollective
from meshwright_dtensor.utils.process import usable_cores
from meshwright_planner.calibration import collectives as collectives_module
from meshwright_planner.calibration import host_overhead, operations
from meshwright_planner.calibration.timing import device
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
        collectives = tuple(
            MeasuredCollective(**{**m, "points": tuple(map(tuple, m["points"]))})
            for m in data.pop("collectives")
        )
        return RankMeasurements(**data, collectives=collectives)


def measure_one_rank(name: str) -> Cluster:
    """The measurements of one rank; links need two."""
    accelerated = device().type == "cuda"
    top, room = (4e12, 2**31) if accelerated else (5e9, 2**27)
    curves = []
    operations.settle()
    entry = operations.entry(POINT_S)
    for dtype in DTYPES:
        curves.append(operations.measured("matmul", dtype, operations.products(dtype, top), POINT_S, entry))
        for width in HEAD_WIDTHS:
            cases = operations.attentions(width, dtype, top / 4)
            curves.append(operations.measured(attention_kind(width), dtype, cases, POINT_S, entry))
    for kind in operations.KINDS:
        cases = operations.streams(kind, torch.float32, room)
        curves.append(operations.measured(kind, torch.float32, cases, POINT_S, entry))
    curves += [
        operations.views(POINT_S),
        operations.updates(POINT_S, 4.0 * room),
        operations.thin(POINT_S, entry, curves[0]),
    ]
    pages = None if accelerated else operations.fresh(POINT_S, room)
    curves += [] if pages is None else [pages]
    forward, back = operations.launches(POINT_S)
    rates = {
        m.dtype: max(size / seconds for size, seconds in m.forward) for m in curves if m.kind == "matmul"
    }
    memory = torch.cuda.get_device_properties(0).total_memory if accelerated else _memory()
    cluster = Cluster(
        name=name,
        devices_per_node=torch.cuda.device_count() if accelerated else 64,
        memory_bytes=memory,
        flops={
            "float32": rates["float32"],
            "float64": rates["float32"] / 2,
            "float16": rates["bfloat16"],
            **rates,
        },
        memory_bandwidth=operations.bandwidth(room),
        links=(LinkLevel("loopback", 0, 50e-6, 1e9),),
        source=f"measured by meshwright calibrate: {_machine()}, torch {torch.__version__}",
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        launch_s=forward,
        launch_backward_s=back,
        update_s=next(m for m in curves if m.kind == "update").forward[0][1],
        hides_launch=accelerated,
        hides_communication=accelerated,
        fused_attention=accelerated,
        cores=0 if accelerated else usable_cores(),
        work=tuple(curves),
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
    """The profile of the machine from the measurements of one rank and of each number of ranks.

    Without a second rank the links stay as assumed.
    """
    if not parts:
        return cluster
    parts = sorted(parts, key=lambda part: part.ranks)
    several, links = [part for part in parts if part.ranks > 1], cluster.links
    if several:
        sent = next(m.points for m in several[0].collectives if m.kind == "send_recv")
        links = (LinkLevel("loopback", 0, sent[0][1], sent[-1][0] / sent[-1][1]),)
    crowding, most = [(1, 1.0)], 1.0
    for part in several:
        most = max(most, part.slower)
        crowding.append((part.ranks, round(most, 4)))
    return replace(
        cluster,
        links=links,
        source=cluster.source if several else f"{cluster.source}; links are not measured, with one rank",
        crowding=tuple(crowding),
        dispatch_s=min(part.dispatch_s for part in parts),
        collectives=tuple(m for part in parts for m in part.collectives),
        memory_bytes=cluster.memory_bytes // parts[-1].ranks if cluster.cores else cluster.memory_bytes,
    )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine() -> str:
    if device().type == "cuda":
        return torch.cuda.get_device_name(0)
    return f"{platform.machine()}, {usable_cores()} cores, {torch.get_num_threads()} thread(s) for each rank"
