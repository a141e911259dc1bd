"""What depends on the shapes of a batch: its profile, the stages cut by it, and their random numbers; kept for the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.analysis.loss_additivity import (
    NO_LOSS,
    Additivity,
    NotAdditive,
    Reason,
    prove_additive,
    single_microbatch,
)
from meshwright_pipeline.analysis.row_mixing import CannotSplit, find_row_mixing
from meshwright_pipeline.partition.boundaries import Cut, cut
from meshwright_pipeline.partition.units import DROPOUTS, Ownership
from meshwright_pipeline.runtime.executor import Runtime
from meshwright_pipeline.runtime.full_batch_tail import Tail, joints_of
from meshwright_pipeline.runtime.p2p import Transport
from meshwright_pipeline.runtime.stage import Stage
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.loss_path import LossPathCheck
from meshwright_pipeline.trace.microbatch import Call, outline, signature
from meshwright_pipeline.trace.profile import Profile
from meshwright_pipeline.trace.profiler import Profiler
from meshwright_pipeline.trace.rng_replay import RngReplay

MAX_SIGNATURES = 64


@dataclass
class Prepared:
    """What batches of one signature are run with.

    Attributes:
        profile: that of a microbatch; `whole` that of the batch, where it is known.
        sameness: of how the loss is computed in each step.
        tail, adding: the code behind the last unit, and how the loss adds up, once that has been asked for.
        unproven: why it does not; NO_LOSS where there is none.
    """

    runtime: Runtime
    profile: Profile
    streams: RngReplay | None
    profiler: Profiler
    whole: Profile | None
    cut: Cut
    tail: Tail | None = None
    adding: Additivity | None = None
    unproven: Reason | None = None
    asked: bool = False
    sameness: LossPathCheck = field(default_factory=LossPathCheck)


class Preparing:
    """Prepares batches, and keeps what it has prepared.

    Args:
        skeleton: the structure of the model (see skeleton.skeleton).
        owned: which stage holds what.
        schedule, table: what runs when.
        shape: ranks, stages, microbatches.
        transport: messages along the axis.
        mesh: the mesh of a stage, None where values are ordinary tensors.
        dtype: what a float32 model is computed in.
        split: see Runtime.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        owned: Ownership,
        schedule: Schedule,
        table: Timetable,
        shape: Shape,
        transport: Transport,
        mesh: DeviceMesh | None,
        dtype: torch.dtype,
        split: bool,
    ) -> None:
        self.skeleton, self.owned = skeleton, owned
        self.schedule, self.table, self.shape = schedule, table, shape
        self.transport, self.mesh, self.dtype, self.split = transport, mesh, dtype, split
        self.ours: Mapping[nn.Module, frozenset[int]] = {}
        self._known: dict[Any, Prepared] = {}
        self._looked: dict[Any, CannotSplit | None] = {}

    def forget(self) -> None:
        """Prepare anew from now on: messages may be out of step."""
        self._known.clear()

    def runtime(self, stages: Mapping[int, Stage]) -> Runtime:
        """The runtime of these stages."""
        return Runtime(stages, self.shape, self.schedule, self.table, self.transport, self.mesh, self.split)

    def prepared(self, model: nn.Module, call: Call, whole: Call, training: bool) -> Prepared:
        """For a batch `whole`, of which `call` is a microbatch."""
        key = (signature(call), training, tuple(map(_mode, model.modules())))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_SIGNATURES:
                self._known.pop(next(iter(self._known)))
            found = self._known[key] = self._prepare(model, call, whole)
        return found

    def _prepare(self, model: nn.Module, call: Call, whole: Call) -> Prepared:
        for ours, copied in zip(model.modules(), self.skeleton.modules(), strict=True):
            copied.training = ours.training
            if isinstance(ours, DROPOUTS):
                copied.__dict__["p"] = ours.p
        self.check_rows(whole)
        profiler = Profiler(self.skeleton, self.owned.units)
        profile = profiler.run(*self._whole(call))
        streams, entire = None, None
        if profile.draws:
            if self.shape.microbatches > 1:
                entire = profiler.run(*self._whole(whole))
            streams = RngReplay((entire or profile).draws, self.shape.microbatches)
        made = cut(profile, self.owned)
        stages = {
            index: Stage(model, self.owned.units, index, made, profile, self.ours, streams)
            for index in self.schedule.own(self.transport.rank, self.shape)
        }
        return Prepared(self.runtime(stages), profile, streams, profiler, entire, made)

    def check_rows(self, whole: Call) -> None:
        """That microbatches change nothing, looked at once for each way to call the model.

        Raises:
            PlanError: rows are mixed, or a forward writes what it would write for each of them.
        """
        count = self.shape.microbatches
        if count == 1:
            return
        key = (tuple(map(_mode, self.skeleton.modules())), outline(whole))
        if key not in self._looked:
            self._looked[key] = find_row_mixing(self.skeleton, self.owned.units, self._whole(whole))
        found = self._looked[key]
        if found is not None:
            raise PlanError("pipeline.microbatches", count, str(found), "1")

    def adding(self, prepared: Prepared, whole: Call) -> Additivity | None:
        """How the loss of the batch `whole` follows from those of microbatches; None where it has none, or that is not proven."""
        if not prepared.asked:
            prepared.asked = True
            output = prepared.profile.output
            if loss_of(output) is not None and self.shape.microbatches == 1:
                prepared.adding = single_microbatch(output)
            elif loss_of(output) is not None:
                entire = prepared.whole or prepared.profiler.run(*self._whole(whole))
                try:
                    count = self.shape.microbatches
                    prepared.adding = prove_additive(prepared.profiler, entire, self._whole(whole), count)
                except NotAdditive as unproven:  # the tail is then asked for, which is made by the profile
                    prepared.whole, prepared.unproven = entire, unproven.why
            else:
                prepared.unproven = NO_LOSS
        return prepared.adding

    def tail(self, model: nn.Module, prepared: Prepared, whole: Call) -> Tail:
        """What runs the code behind the last unit on the batch `whole`.

        Raises:
            UnsupportedError: what it takes is not known of the whole batch.
        """
        if prepared.tail is None:
            count, made = self.shape.microbatches, prepared.cut
            if count == 1:
                prepared.whole = prepared.profile
            elif prepared.whole is None:
                prepared.whole = prepared.profiler.run(*self._whole(whole))
            ways = joints_of(made.final, prepared.profile, prepared.whole, count)
            behind = len(self.owned.stages)
            stage = Stage(model, self.owned.units, behind, made, prepared.whole, self.ours, prepared.streams)
            prepared.tail = Tail(stage, ways, self.mesh)
        return prepared.tail

    def _whole(self, call: Call) -> Call:
        """Global values as ordinary tensors, in the dtype that they are computed in."""

        def one(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.full_tensor() if isinstance(tensor, GlobalTensor) else tensor
            return whole.to(self.dtype) if whole.dtype == torch.float32 else whole

        changed: Call = pytree.tree_map_only(torch.Tensor, one, call)
        return changed


def _mode(module: nn.Module) -> tuple[bool, bool]:
    """What decides whether a module draws random numbers: its mode, and whether a dropout drops some and not all."""
    return module.training, isinstance(module, DROPOUTS) and 0 < module.p < 1
