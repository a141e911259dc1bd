"""What the rank of the last stage has, told to all ranks of the axis: one message each, so that a death is heard at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor
_TAG = (1 << 30) + (3 << 20)


class Lost(Exception):
    """A rank of the axis, `rank`, did not send or take its message, and why."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} of pp: {reason}")
        self.rank, self.reason = rank, reason


class Spread:
    """From one rank of the axis to all.

    Args:
        group: the ranks of the axis.
        device: where tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def give(self, told: Any, tensors: Sequence[Tensor]) -> None:
        """Send `told`, which is pickled, and dense tensors.

        Raises:
            Lost: a rank has not taken them; all others have.
        """
        content = torch.frombuffer(bytearray(pickle.dumps(told)), dtype=torch.uint8).to(self.device)
        size = torch.tensor([content.numel()], device=self.device)
        works = []
        lost: Lost | None = None
        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                for place, tensor in enumerate((size, content, *tensors)):
                    work = dist.isend(tensor, group=self.group, group_dst=rank, tag=_TAG + place)
                    works.append((rank, work))
            except RuntimeError as error:
                lost = lost or Lost(rank, _told(error))
        dead = set() if lost is None else {lost.rank}
        for rank, work in works:
            if work is None or rank in dead:
                continue
            try:
                work.wait()
            except RuntimeError as error:
                dead.add(rank)
                lost = lost or Lost(rank, _told(error))
        if lost is not None:
            raise lost

    def take(self, source: int, make: Callable[[Any], list[Tensor]]) -> tuple[Any, list[Tensor]]:
        """(what was told, the tensors).

        Args:
            make: what was told -> empty tensors for what follows.

        Raises:
            Lost: the source is gone.
        """
        try:
            size = torch.zeros(1, dtype=torch.int64, device=self.device)
            dist.recv(size, group=self.group, group_src=source, tag=_TAG)
            content = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
            dist.recv(content, group=self.group, group_src=source, tag=_TAG + 1)
            told = pickle.loads(content.cpu().numpy().tobytes())
            tensors = make(told)
            for place, tensor in enumerate(tensors):
                dist.recv(tensor, group=self.group, group_src=source, tag=_TAG + 2 + place)
        except RuntimeError as error:
            raise Lost(source, _told(error)) from error
        return told, tensors


def _told(error: Exception) -> str:
    line = str(error).split("\n")[0][:200]
    return f"it has died or hangs: the result of the model did not come from it, or not to it ({line})"
