"""The process groups over which the tensors of a pipeline travel.

gloo matches messages by tags: one group does. NCCL and its like match the sends and receives of two ranks in the order in which
each of them makes them, whatever their tags. So there each cut has, in each direction, a group of its own among those of its
two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor._torch.groups import new_group
from meshwright_dtensor.devices import HOST, device_of
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.mesh.mesh import backend_of, check_sends
from meshwright_dtensor.schedule.timetable import Timetable

Channel = tuple[int, bool]
"""(cut, whether gradients travel over it)."""


def channels_of(table: Timetable) -> dict[Channel, int]:
    """Channel -> number of its group, so that no two channels between the same two ranks share one."""
    taken: Counter[frozenset[int]] = Counter()
    numbers = {}
    for cut in range(table.shape.stages - 1):
        ends = frozenset((table.owner(cut), table.owner(cut + 1)))
        for backward in (False, True) if len(ends) == 2 else ():
            numbers[cut, backward] = taken[ends]
            taken[ends] += 1
    return numbers


def check_order(table: Timetable) -> None:
    """Raises PlanError: over some cut, microbatches are not sent in the order in which they are received."""
    for cut, backward in channels_of(table):
        kinds, source, target = ("BI", cut + 1, cut) if backward else ("F", cut, cut + 1)
        sent, received = (
            [a.microbatch for a in table.ranks[table.owner(stage)] if a.stage == stage and a.kind in kinds]
            for stage in (source, target)
        )
        if sent != received:
            raise PlanError(
                "pipeline.schedule",
                table.schedule.name,
                f"stage {source} sends its microbatches in the order {sent} and stage {target} takes them in the order {received}, "
                "which NCCL cannot tell apart",
                "1f1b, or another schedule whose stages take microbatches in one order",
            )


def tensor_groups(
    group: dist.ProcessGroup, device: torch.device, table: Timetable
) -> Mapping[Channel, dist.ProcessGroup]:
    """The group of each channel that is not `group` itself (a collective call of all ranks).

    Raises UsageError: the backend sends no tensors of this device. Raises PlanError: see `check_order`.
    """
    check_sends(group, device, "a pipeline (pp)")
    backend = backend_of(group, device.type)
    record = device_of(device)
    if record.matches_tags(backend):
        return {}
    if backend_of(group, HOST.type) is None:
        raise UsageError(
            f"a pipeline (pp) sends small messages between ranks on the CPU, and this process group has {backend} for "
            f"{device.type} alone; let mw.init() make it, or init_process_group({record.start_backend()!r})"
        )
    check_order(table)
    channels = channels_of(table)
    # every rank of the world has to take part in making a group, and gives it a name that was never used
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, dist.get_process_group_ranks(group))
    made = []
    for _ in range(max(channels.values(), default=-1) + 1):
        of_each = {tuple(ranks): new_group(ranks, backend) for ranks in _distinct(everywhere)}
        made.append(of_each[tuple(everywhere[dist.get_rank()])])
    groups = {channel: made[number] for channel, number in channels.items()}
    _connect(groups, dist.get_rank(group), device, table)
    return groups


def _distinct(lists: list[list[int]]) -> list[list[int]]:
    return sorted({tuple(ranks): ranks for ranks in lists}.values())


def _connect(
    groups: Mapping[Channel, dist.ProcessGroup], rank: int, device: torch.device, table: Timetable
) -> None:
    """Send one element over every channel: the first message of two ranks waits for both, which in a step could wait for ever."""
    for (cut, backward), group in groups.items():
        ends = [table.owner(cut), table.owner(cut + 1)]
        source, target = reversed(ends) if backward else ends
        element = torch.zeros(1, device=device)
        if rank == source:
            dist.send(element, group=group, group_dst=target)
        elif rank == target:
            dist.recv(element, group=group, group_src=source)
