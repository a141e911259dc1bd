"""Agreement between ranks: before a step within a stage, and at its end between all ranks of the run.

At the end of a step all ranks have the loss, or all have the same error. Each rank sends one message to rank 0, which
answers all of them. A collective would do the same while all ranks live. But only the next ranks in the ring notice at
once that a rank has died; the others would wait until the timeout of the group.
"""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.mesh.mesh import extremes, group_over, message_device
from meshwright_dtensor.model.batch_text import SAME_BATCH, SAME_RANDOM, difference, split_random_state
from meshwright_dtensor.schedule.schedule import Action
from meshwright_pipeline.runtime.p2p.messages import packets, receive_bytes, send_to_each

Tensor = torch.Tensor
_VOTES = (1 << 30) + (1 << 22)
_BROADCAST = (1 << 30) + (3 << 20)


class RankLost(Exception):
    """A rank of the axis did not send or receive its message."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} of pp: {reason}")
        self.rank, self.reason = rank, reason


# ---- within a stage, before a step
class StageRanks:
    """The ranks of one stage: before each step they agree, with one small all-reduce, that all can begin.

    A rank that cannot begin would leave the others waiting in its collectives. With no mesh, or one rank, there is nothing to
    agree on.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.group: dist.ProcessGroup | None = None
        if mesh is not None and mesh.size() > 1:
            sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
            self.group = group_over(mesh, [name for name, n in sizes if n > 1])

    def refusal(self, batch: str | None, per_microbatch: bool = False) -> str | None:
        """Why this step cannot run (collective): "" for a failure of another rank, None where it can.

        `batch`: what this rank was given and whether gradients are on, in words; None where it cannot begin.
        `per_microbatch`: the loss adds up over microbatches, as this rank sees it.
        """
        if self.group is None:
            return None
        given, random_state = split_random_state(batch or "")
        checksums = (zlib.crc32(text.encode()) for text in (given, random_state))
        values = [int(batch is None), int(per_microbatch), *checksums]
        (_, failed), modes, batches, states = extremes(values, self.group)
        if failed:
            return ""
        if batches[0] != batches[1]:
            return f"ranks of one stage were given different batches, this one {given}; {SAME_BATCH}"
        if states[0] != states[1]:
            return f"ranks of one stage have different random numbers, {SAME_RANDOM}"
        if modes == (0, 1):
            return (
                "ranks of one stage do not agree whether the loss adds up over microbatches, this one found that it "
                f"{'does' if per_microbatch else 'does not'}: one of them may have run out of memory while checking, or computes "
                "another loss; give every rank the same model and memory, or set pipeline.microbatches to 1"
            )
        return None


# ---- between all ranks, at the end of a step
@dataclass(frozen=True)
class Report:
    """A failure on a rank of the run.

    Attributes:
        doubt: 0: seen by the rank itself; 1: the rank waited in vain for another; 2: only that the rank did not come to
            the end of the step.
        when: when the action ends in the timetable: the earliest failure is the cause.
    """

    action: Action
    rank: int
    reason: str
    doubt: int = 0
    when: float = 0.0


@dataclass(frozen=True)
class Vote:
    """The message of one rank at the end of a step: a value that is summed over the ranks, its failure, and what the model was
    given, in words, which must be that of every rank.
    """

    value: tuple[float, float]
    report: Report | None
    batch: str


class Agreement:
    """Agreement between all ranks of a run. `last`: rank -> the action that ends its steps, if nothing else is known of it."""

    def __init__(self, group: dist.ProcessGroup, last: Callable[[int], Action]) -> None:
        self.group, self.last_action = group, last
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def settle(self, vote: Vote) -> Report | tuple[float, float]:
        """The sum of the values of all ranks, or the failure of one; the same on every rank."""
        if self.rank == 0:
            return self._lead(vote)
        try:
            self._send(vote, [0])
            verdict: Report | tuple[float, float] = pickle.loads(self._receive(0)())
        except RuntimeError as error:
            return vote.report or self._missing(0, error)
        return verdict

    def _lead(self, vote: Vote) -> Report | tuple[float, float]:
        votes, reports = {0: vote}, [] if vote.report is None else [vote.report]
        pending: dict[int, Callable[[], bytes]] = {}
        for rank in range(1, self.size):
            try:
                pending[rank] = self._receive(rank)
            except RuntimeError as error:
                reports.append(self._missing(rank, error))
        for rank, message in pending.items():
            try:
                votes[rank] = pickle.loads(message())
            except RuntimeError as error:
                reports.append(self._missing(rank, error))
                continue
            report = votes[rank].report
            if report is not None:
                reports.append(report)
            elif vote.report is None and votes[rank].batch != vote.batch:
                reason = difference("it", vote.batch, votes[rank].batch)
                reports.append(Report(self.last_action(rank), rank, reason, 1))
        sums = [sum(values) for values in zip(*(each.value for each in votes.values()), strict=True)]
        verdict = min(reports, key=lambda r: (r.doubt, r.when)) if reports else (sums[0], sums[1])
        # the next step notices a rank that dies before the answer comes
        with contextlib.suppress(RuntimeError):
            self._send(verdict, [*votes][1:])
        return verdict

    def _send(self, content: Any, ranks: Sequence[int]) -> None:
        lost = send_to_each(
            packets(pickle.dumps(content), _VOTES, message_device(self.group)), ranks, self.group
        )
        for error in lost.values():
            raise error

    def _receive(self, rank: int) -> Callable[[], bytes]:
        return receive_bytes(self.group, rank, _VOTES)

    def _missing(self, rank: int, error: RuntimeError) -> Report:
        reason = f"rank {rank} died, or hangs, before it came to the end of the step ({_first_line(error)})"
        return Report(self.last_action(rank), rank, reason, 2)


# ---- from the last stage
class Broadcast:
    """Results from one rank of the axis to all others; one message to each, so that a death is noticed at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def send(self, header: Any, tensors: Sequence[Tensor]) -> None:
        """Send `header`, which is pickled, and dense tensors. Raises RankLost: a rank has not received them; all others have."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        content = packets(pickle.dumps(header), _BROADCAST, message_device(self.group))
        content += [(_BROADCAST + 2 + place, tensor) for place, tensor in enumerate(tensors)]
        for rank, error in send_to_each(content, others, self.group).items():
            raise RankLost(rank, _result_lost(error))

    def receive(self, source: int, buffers: Callable[[Any], list[Tensor]]) -> tuple[Any, list[Tensor]]:
        """(header, tensors). `buffers`: header -> empty tensors for those that follow. Raises RankLost: the source is gone."""
        try:
            header = pickle.loads(receive_bytes(self.group, source, _BROADCAST)())
            tensors = buffers(header)
            for place, tensor in enumerate(tensors):
                with waiting():
                    dist.recv(tensor, group=self.group, group_src=source, tag=_BROADCAST + 2 + place)
        except RuntimeError as error:
            raise RankLost(source, _result_lost(error)) from error
        return header, tensors


def _result_lost(error: Exception) -> str:
    return f"it has died or hangs: the result of the model did not come from it, or not to it ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


# ---- the ranks
@dataclass(frozen=True)
class RankContext:
    """The position of a rank.

    Attributes:
        group: the ranks of the axis, with the same coordinates on all other axes.
        world: all ranks of the run.
        mesh: the mesh of a stage; None where parameters are ordinary tensors.
        plain: compute with ordinary tensors, since the mesh of a stage has one rank.
        device: of this rank.
        reports_loss: of the ranks of the last stage, the one that tells the dtype of the loss, and a loss that all of them have.
        dtype: what a float32 model is computed in.
    """

    group: dist.ProcessGroup
    world: dist.ProcessGroup
    mesh: DeviceMesh | None
    plain: bool
    device: torch.device
    reports_loss: bool
    dtype: torch.dtype = torch.float32
