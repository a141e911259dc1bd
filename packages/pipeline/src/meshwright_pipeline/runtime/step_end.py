"""The end of a step: what the ranks of a run tell each other, and what the last stage has made for all of its axis."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import StageError, UnsupportedError
from meshwright_dtensor.schedule.schedule import NAMES, Action, Schedule, Shape
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.runtime.broadcast import Lost, Spread
from meshwright_pipeline.runtime.consensus import Agreement, Report
from meshwright_pipeline.runtime.p2p_step import Failure
from meshwright_pipeline.trace.loss import plain_or_none

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        group: ranks of the axis, alike in their places on all others.
        everyone: all ranks of the run.
        mesh: the mesh of a stage; None where parameters are ordinary tensors.
        plain: compute with ordinary tensors, the mesh of a stage being one rank.
        device: of this rank.
        dtype: what a float32 model is computed in.
        speaks: of the ranks of a stage, which all know the loss, this one tells it to the others.
    """

    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    mesh: DeviceMesh | None
    plain: bool
    device: torch.device
    speaks: bool
    dtype: torch.dtype = torch.float32


class Ending:
    """Between the ranks of a run, after the last action.

    Args:
        place: where this rank stands.
        schedule, table, shape: what ran when.
    """

    def __init__(self, place: Place, schedule: Schedule, table: Timetable, shape: Shape) -> None:
        self.place, self.schedule, self.table, self.shape = place, schedule, table, shape
        self.agreement = Agreement(place.everyone, place.device)
        self.spread = Spread(place.group, place.device)

    def agree(
        self, failure: Failure | None, losses: Mapping[int, Tensor] | None = None, batch: str = ""
    ) -> Tensor:
        """The sum of the losses, the same on every rank.

        Args:
            failure: what went wrong on this rank.
            losses: microbatch -> its part of the loss, on the rank of the last stage.
            batch: what this rank was given, in words.

        Raises:
            StageError: something went wrong on a rank; on every rank.
        """
        failed, mine = None, (0.0, 0.0)
        if failure is not None:
            rank = self._of_run(dist.get_rank(self.place.group))
            if failure.lost:
                rank = self._of_run(self.schedule.owner(failure.action.stage, self.shape))
            reason = f"{type(failure.error).__name__}: {failure.error}"
            failed = Report(failure.action, rank, reason, int(failure.lost), self.table.ends[failure.action])
        elif losses and self.place.speaks:
            total = sum(losses[m] for m in sorted(losses))
            assert isinstance(total, Tensor)
            mine = float(total.double()), float(DTYPES.index(total.dtype))
        told = self.agreement.settle(mine, failed, self._last_of, zlib.crc32(batch.encode()))
        if isinstance(told, Report):
            cause = None if failure is None else failure.error
            raise StageError(
                told.action.stage, told.action.microbatch, NAMES[told.action.kind], told.rank, told.reason
            ) from cause
        return torch.tensor(told[0], dtype=DTYPES[int(told[1])], device=self.place.device)

    def lost(self, lost: Lost) -> Failure:
        """A rank of the axis was gone when its actions were done."""
        return Failure(self.table.ranks[lost.rank][-1], ConnectionError(lost.reason), lost=True)

    @property
    def source(self) -> int:
        """The rank of the axis that holds the last stage."""
        return self.schedule.owner(self.shape.stages - 1, self.shape)

    def tell(self, like: Any, made: Callable[[], Sequence[Any]]) -> tuple[list[Any], list[bool]]:
        """The leaves of the result of a step, on all ranks of the axis, and which of them have a gradient.

        Args:
            like: a result of the model as it was profiled.
            made: the leaves, on the rank of the last stage: ordinary tensors that require a gradient where they have one.

        Raises:
            UnsupportedError: the result has other leaves than the profile; on every rank.
            StageError: a rank died; on every rank.
        """
        leaves, failure, told = pytree.tree_leaves(like), None, None
        tensors: list[Tensor] = []
        try:
            if dist.get_rank(self.place.group) == self.source:
                try:
                    given = list(made())
                except Exception as error:  # the others wait for this rank
                    failure, given = Failure(self.table.ranks[self.source][-1], error), []
                if len(given) == len(leaves):
                    leaves, told = given, [_sketch(leaf) for leaf in given]
                    tensors = [leaf.detach().contiguous() for leaf in given if isinstance(leaf, Tensor)]
                self.spread.give(told, tensors)
            else:
                told, tensors = self.spread.take(self.source, self._empty)
        except Lost as lost:
            failure = failure or self.lost(lost)
        self.agree(failure)
        if told is None:
            raise UnsupportedError(
                "the model returned something else than when it was profiled; ask for tensors only (use_cache=False, say)"
            )
        values = iter(tensors)
        found = [
            plain_or_none(leaf) if sketch is None else next(values)
            for leaf, sketch in zip(leaves, told, strict=True)
        ]
        return found, [sketch is not None and sketch[2] for sketch in told]

    def shown(self, value: Tensor) -> Tensor:
        """A value as the user sees it: over the mesh of the stage, where values are."""
        mesh = self.place.mesh
        return value if mesh is None else distribute(value, mesh, ["I"] * mesh.ndim)

    def _empty(self, told: list[Any] | None) -> list[Tensor]:
        sketches = [sketch for sketch in told or () if sketch is not None]
        return [torch.empty(shape, dtype=dtype, device=self.place.device) for shape, dtype, _ in sketches]

    def _of_run(self, rank: int) -> int:
        return dist.get_global_rank(self.place.group, rank)

    def _last_of(self, rank: int) -> Action:
        """The action that ends a step on a rank of the run: the axis of the pipeline is the outermost."""
        return self.table.ranks[rank * self.shape.ranks // dist.get_world_size()][-1]


def _sketch(leaf: Any) -> tuple[tuple[int, ...], torch.dtype, bool] | None:
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else None
