"""The end of a step: all ranks have the loss, or all have the error.

Ranks tell the first one, and that one tells all. A collective would do as well while all live; of a rank that has died only its
neighbours in the ring hear at once, and the others wait for those until the time limit of the group.


The ranks of one stage, before a step: one that cannot begin would leave the others waiting in its collectives.
"""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.mesh.mesh import group_over
from meshwright_dtensor.schedule.schedule import Action

Tensor = torch.Tensor
_TAG = (1 << 30) + (1 << 22)
_OTHER_BATCH = (
    "it was given another batch than rank 0 (shapes, dtypes, or values that are no tensors); a plain tensor is the whole batch, "
    "so give every rank the same (mw.shard_loader reads each rank's part)"
)


@dataclass(frozen=True)
class Report:
    """What failed on a rank of the run.

    Attributes:
        action, rank: where.
        reason: why.
        doubt: 0 for what a rank has seen itself; 1 where it has waited in vain for another; 2 where nothing is known but
            that one did not come to the end.
        when: when the action ends in the timetable: what was missed first is the cause.
    """

    action: Action
    rank: int
    reason: str
    doubt: int = 0
    when: float = 0.0


class Agreement:
    """Between all ranks of a run.

    Args:
        group: all of them.
        device: where messages are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def settle(
        self,
        value: tuple[float, float],
        failed: Report | None,
        last: Callable[[int], Action],
        batch: int = 0,
    ) -> Report | tuple[float, float]:
        """The sum of the values of all ranks, or the failure of one, the same on every rank.

        Args:
            batch: a checksum of what the model was given, which has to be that of every rank.
            last: the action that ends the step on a rank of the run, for a report on one of which nothing else is known.
        """
        mine = torch.tensor(
            [float(failed is not None), *value, float(batch)], dtype=torch.float64, device=self.device
        )
        if self.size == 1:
            return failed if failed is not None else value
        if self.rank == 0:
            return self._lead(mine, failed, last)
        try:
            self._send(mine, 0)
            if failed is not None:
                self._send_report(failed, 0)
            self._receive(mine, 0)
            if mine[0]:
                return self._receive_report(0)
        except RuntimeError as error:
            return failed or Report(last(0), 0, _died(0, error), 2)
        return mine[1].item(), mine[2].item()

    def _lead(
        self, mine: Tensor, failed: Report | None, last: Callable[[int], Action]
    ) -> Report | tuple[float, float]:
        reports = [] if failed is None else [failed]
        gone: set[int] = set()
        arriving = {}
        for rank in range(1, self.size):
            told = torch.zeros_like(mine)
            try:
                arriving[rank] = (told, dist.irecv(told, group=self.group, group_src=rank, tag=_TAG))
            except RuntimeError as error:
                gone.add(rank)
                reports.append(Report(last(rank), rank, _died(rank, error), 2))
        for rank, (told, work) in arriving.items():
            try:
                if work is not None:
                    work.wait()
                mine[1:3] += told[1:3]
                if told[0]:
                    reports.append(self._receive_report(rank))
                elif failed is None and told[3] != mine[3]:
                    reports.append(Report(last(rank), rank, _OTHER_BATCH, 1))
            except RuntimeError as error:
                gone.add(rank)
                reports.append(Report(last(rank), rank, _died(rank, error), 2))
        found = min(reports, key=lambda report: (report.doubt, report.when)) if reports else None
        mine[0] = float(found is not None)
        sent = []
        for rank in range(1, self.size):
            if rank in gone:
                continue
            try:
                if found is None:
                    sent.append(dist.isend(mine, group=self.group, group_dst=rank, tag=_TAG))
                else:
                    self._send(mine, rank)
                    self._send_report(found, rank)
            except RuntimeError:
                gone.add(rank)
        for work in sent:
            if work is not None:
                with contextlib.suppress(RuntimeError):  # who has died since need not be told
                    work.wait()
        return found if found is not None else (mine[1].item(), mine[2].item())

    # ---- messages
    def _send(self, tensor: Tensor, rank: int, tag: int = 0) -> None:
        dist.send(tensor, group=self.group, group_dst=rank, tag=_TAG + tag)

    def _receive(self, tensor: Tensor, rank: int, tag: int = 0) -> None:
        dist.recv(tensor, group=self.group, group_src=rank, tag=_TAG + tag)

    def _send_report(self, report: Report, rank: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(report)), dtype=torch.uint8).to(self.device)
        self._send(torch.tensor([content.numel()], device=self.device), rank, 1)
        self._send(content, rank, 2)

    def _receive_report(self, rank: int) -> Report:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._receive(size, rank, 1)
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        self._receive(content, rank, 2)
        report: Report = pickle.loads(bytes(content.cpu().tolist()))
        return report


def _died(rank: int, error: RuntimeError) -> str:
    return f"rank {rank} died, or hangs, before it came to the end of the step ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


class Mates:
    """What the ranks of a stage tell each other in one small all-reduce before each step; nothing where there is one.

    Args:
        mesh: of the stage.
        device: where tensors of its collectives live.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.device = device
        self.group: dist.ProcessGroup | None = None
        if mesh is not None and mesh.size() > 1:
            names = mesh.mesh_dim_names
            assert names is not None  # meshes of plans have them
            self.group = group_over(mesh, [name for name, n in zip(names, mesh.shape, strict=True) if n > 1])

    def apart(self, batch: str | None, adds: bool = False) -> str | None:
        """Why this step cannot run in the stage (collective): "" for a failure of another rank, None where it can.

        Args:
            batch: what this rank was given, in words, and does with it; None where it cannot begin.
            adds: whether it has found that the loss adds up, so that backwards run inside of the step.
        """
        if self.group is None:
            return None
        crc = 0 if batch is None else zlib.crc32(batch.encode())
        told = torch.tensor([batch is None, crc, -crc, adds, not adds], dtype=torch.int64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        failed, most, least, some, others = told.tolist()
        if failed:
            return ""
        if most != -least:
            return (
                f"ranks of one stage were given different batches, this one {batch}; give every rank the same"
            )
        if some and others:
            return (
                "ranks of one stage do not agree whether the loss adds up over microbatches, this one found that it "
                f"{'does' if adds else 'does not'}: one of them may have run out of memory where it looked, or computes another "
                "loss; give every rank the same model and memory, or set pipeline.microbatches to 1"
            )
        return None
