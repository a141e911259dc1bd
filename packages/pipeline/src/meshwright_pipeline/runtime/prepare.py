"""Everything that depends on the shapes of a batch: its profile, the stages, their random numbers; cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.analysis.loss_additivity import NO_LOSS, Additivity, Leaf, Reason, prove_additive
from meshwright_pipeline.analysis.row_mixing import CannotSplit, find_row_mixing
from meshwright_pipeline.partition.boundaries import Cut, cut
from meshwright_pipeline.partition.units import Ownership
from meshwright_pipeline.pytrees import full_value, leaves_of
from meshwright_pipeline.runtime.actions.executor import RankStages
from meshwright_pipeline.runtime.actions.full_batch_tail import Tail, row_dims
from meshwright_pipeline.runtime.actions.stage import Stage
from meshwright_pipeline.runtime.agreement import RankContext
from meshwright_pipeline.runtime.p2p.channels import tensor_groups
from meshwright_pipeline.runtime.p2p.messages import Transport
from meshwright_pipeline.runtime.p2p.step import Peers
from meshwright_pipeline.runtime.settings import Settings
from meshwright_pipeline.trace.forward_hooks import UnitCalls
from meshwright_pipeline.trace.loss import LossPaths, loss_of
from meshwright_pipeline.trace.loss_denominators import Denominators, MicrobatchNumbers, sum_denominators
from meshwright_pipeline.trace.microbatch import Call, outline, rows_of, signature
from meshwright_pipeline.trace.profile import Profile
from meshwright_pipeline.trace.profiler import Profiler
from meshwright_pipeline.trace.rng_replay import RngReplay
from meshwright_pipeline.trace.state.state_writes import modules_outside, plain_state

MAX_SIGNATURES = 64


@dataclass
class Prepared:
    """Everything that batches of one signature need.

    Attributes:
        profile: of a microbatch; `batch_profile`: of the whole batch, once it has been needed.
        streams: the random numbers of a step; None where the model draws none.
        cut: which unit runs on which stage, and what crosses.
        tail: the code after the last unit, once it has been needed.
        additivity: how the loss follows from those of microbatches, or why that is not proven, once asked for.
        loss_paths: how the first step computed the loss; see `check_loss_path`.
        plain_targets: the state of the model outside of units, with which losses had plain targets, these, and
            `Denominators.after`; () for none.
    """

    stages: RankStages
    profile: Profile
    streams: RngReplay | None
    profiler: Profiler
    batch_profile: Profile | None
    cut: Cut
    tail: Tail | None = None
    additivity: Additivity | Reason | None = None
    loss_paths: LossPaths = field(default_factory=dict)
    plain_targets: tuple[Any, ...] = ()


class Preparation:
    """Prepares batches, with a cache by signature.

    Args:
        skeleton: the structure of the model on the meta device.
        split: see RankStages.

    Attributes:
        mesh: the mesh of a stage; None where values are ordinary tensors.
        calls: takes over the calls of units while a step runs.
        settings: what the user may change on modules, once the model is installed.
    """

    def __init__(
        self, skeleton: nn.Module, owned: Ownership, table: Timetable, context: RankContext, split: bool
    ) -> None:
        self.skeleton, self.owned, self.table, self.split = skeleton, owned, table, split
        groups = tensor_groups(context.group, context.device, table)
        self.transport = Transport(context.group, context.device, groups)
        self.mesh, self.dtype = None if context.plain else context.mesh, context.dtype
        self.calls = UnitCalls(owned.units)
        self.settings: Settings | None = None
        # the modules that hold units, once asked for
        self._outside: list[nn.Module] | None = None
        self._prepared: dict[Any, Prepared] = {}
        self._row_checks: dict[Any, CannotSplit | None] = {}

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.table.shape.microbatches

    @property
    def _settings(self) -> Settings:
        assert self.settings is not None
        return self.settings

    def forget(self) -> None:
        """Prepare everything again from now on: after a failure, ranks may not know the same headers."""
        self._prepared.clear()

    def rank_stages(self, stages: Mapping[int, Stage]) -> RankStages:
        """These stages with their peers."""
        return RankStages(stages, Peers(self.transport, self.table), self.mesh, self.split)

    def prepared(self, model: nn.Module, call: Call, whole: Call, full: Call, training: bool) -> Prepared:
        """For a batch `whole`, of which `call` is a microbatch. `full`: the batch with the rows of all microbatches."""
        rows = None if full is whole else rows_of(*whole)
        key = (signature(call), rows, training, self._settings.key())
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= MAX_SIGNATURES:
                self._prepared.pop(next(iter(self._prepared)))
            prepared = self._prepared[key] = self._prepare(model, call, whole, full)
        return prepared

    def _prepare(self, model: nn.Module, call: Call, whole: Call, full: Call) -> Prepared:
        self._settings.copy_to(model, self.skeleton)
        self.check_rows(full)
        profiler = Profiler(self.skeleton, self.owned.units)
        profile = profiler.run(*self._plain(call))
        streams, batch_profile = None, None
        if profile.draws:
            if self.microbatches > 1:
                batch_profile = profiler.run(*self._plain(whole))
            rows = (rows_of(*whole) or 1, rows_of(*full) or 1)
            streams = RngReplay(
                (batch_profile or profile).draws, self.microbatches, rows, self.transport.device
            )
        boundaries = cut(profile, self.owned)
        stages = {
            index: Stage(model, self.calls, index, boundaries, profile, self._settings.own_hooks, streams)
            for index in self.table.schedule.own(self.transport.rank, self.table.shape)
        }
        return Prepared(self.rank_stages(stages), profile, streams, profiler, batch_profile, boundaries)

    def check_rows(self, whole: Call) -> None:
        """Check, once for each way to call the model, that its results are the same in microbatches.

        Raises PlanError: rows of the batch interact, or a forward writes state that depends on its rows.
        """
        if self.microbatches == 1:
            return
        key = (self._settings.key(), outline(whole))
        if key not in self._row_checks:
            self._row_checks[key] = find_row_mixing(self.skeleton, self.owned.units, self._plain(whole))
        refusal = self._row_checks[key]
        if refusal is not None:
            raise PlanError("pipeline.microbatches", self.microbatches, str(refusal), "1")

    def additivity(self, prepared: Prepared, whole: Call) -> Additivity | Reason:
        """How the loss of the batch `whole` follows from those of microbatches, or why that is not proven."""
        output = prepared.profile.output
        if prepared.additivity is not None:
            return prepared.additivity
        if loss_of(output) is None:
            prepared.additivity = NO_LOSS
        elif self.microbatches == 1:
            prepared.additivity = Additivity(Leaf(), tuple(Leaf() for _ in leaves_of(output)))
        else:
            plain = self._plain(whole)
            profile = prepared.batch_profile or prepared.profiler.run(*plain)
            prepared.additivity = prove_additive(prepared.profiler, profile, plain, self.microbatches)
            if isinstance(prepared.additivity, Reason):
                # the tail will need it
                prepared.batch_profile = profile
        return prepared.additivity

    def denominators(
        self, prepared: Prepared, additivity: Additivity, calls: Sequence[Call]
    ) -> Denominators | None:
        """Loss denominators of the whole batch, on the rank of the last stage; None where microbatches need none."""
        last = prepared.stages.stages.get(len(self.owned.stages) - 1)
        if last is None or len(calls) == 1 or not (additivity.averaging or additivity.fixed):
            return None
        if self._outside is None:
            self._outside = [module for _, module in modules_outside(last.model, self.owned.units)]
        state = plain_state(self._outside)
        if prepared.plain_targets[:1] == (state,):
            plain = prepared.plain_targets[1]
            parts = [MicrobatchNumbers.of_plain(leaves_of(call), plain) for call in calls]
            numbers = sum_denominators(parts, additivity.averaging, ())
            return replace(numbers, seen=tuple([] for _ in plain), after=prepared.plain_targets[2])
        with self.calls.replaced(last.model):
            parts = [last.count(*call, additivity.fixed) for call in calls]
        numbers = sum_denominators(parts, additivity.averaging, additivity.fixed)
        plain = parts[0].plain
        alike = None not in plain and all(part.plain == plain for part in parts)
        # a forward that counts its calls, say, may go another way in the next step
        same = not additivity.fixed and state == plain_state(self._outside)
        prepared.plain_targets = (state, plain, numbers.after) if alike and same else ()
        return numbers

    def tail(self, model: nn.Module, prepared: Prepared, whole: Call, full: Call) -> Tail:
        """The code after the last unit, to run on the batch `whole`. `full`: see `prepared`.

        Raises UnsupportedError: its inputs for the whole batch do not follow from those of microbatches.
        """
        if prepared.tail is None:
            if self.microbatches == 1:
                prepared.batch_profile = prepared.profile
            elif prepared.batch_profile is None:
                prepared.batch_profile = prepared.profiler.run(*self._plain(whole))
            profile, boundaries = prepared.batch_profile, prepared.cut
            of_all = profile if full is whole else prepared.profiler.run(*self._plain(full))
            dims = row_dims(boundaries.final, prepared.profile, of_all, self.microbatches)
            hooks, index = self._settings.own_hooks, len(self.owned.stages)
            stage = Stage(model, self.calls, index, boundaries, profile, hooks, prepared.streams)
            prepared.tail = Tail(stage, dims, self.mesh)
        return prepared.tail

    def _plain(self, call: Call) -> Call:
        """`call` with ordinary tensors in place of global ones, in the dtype that they are computed in."""

        def plain(tensor: torch.Tensor) -> torch.Tensor:
            full = full_value(tensor)
            return full.to(self.dtype) if full.dtype == torch.float32 else full

        changed: Call = pytree.tree_map_only(torch.Tensor, plain, call)
        return changed
