"""Which rank of another host holds a copy of a rank's file, and sending it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist


def holders(hosts: Sequence[str]) -> list[int | None]:
    """Rank -> the rank that holds a copy of its file: one of the next host, in the order of ranks; None with one host.

    hosts: of each rank.
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    names = list(members)
    if len(names) == 1:
        return [None] * len(hosts)
    result: list[int | None] = []
    for host in hosts:
        after = members[names[(names.index(host) + 1) % len(names)]]
        place = len([other for other in hosts[: len(result)] if other == host])
        result.append(after[place % len(after)])
    return result


def exchange(
    sent: torch.Tensor,
    holder: int | None,
    received: Mapping[int, torch.Tensor],
    group: dist.ProcessGroup | None,
    tag: int = 0,
) -> None:
    """Send the bytes of this rank's file to its holder, and receive those of other ranks.

    group: in which nothing else is sent meanwhile with that tag. Raises RuntimeError: a rank has ended, or did not send in time.
    """
    works = []
    if holder is not None:
        works.append(dist.isend(sent, group=group, group_dst=holder, tag=tag))
    for source, memory in received.items():
        works.append(dist.irecv(memory, group=group, group_src=source, tag=tag))
    for work in works:
        if work is not None:
            work.wait()
