"""`model(**batch)` of a pipelined model: one step of the schedule, inside the call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import StageError, UnsupportedError
from meshwright_dtensor.global_tensor import GlobalTensor, distribute
from meshwright_pipeline._torch import at_end_of_backward, hooks_of, pytree
from meshwright_pipeline.actions import NAMES, Action, Schedule, Shape, Timetable
from meshwright_pipeline.agreement import Agreement, Report
from meshwright_pipeline.batching import Call, joined, microbatches, rows_of, signature
from meshwright_pipeline.counting import divisors, may_differ
from meshwright_pipeline.cutting import cut
from meshwright_pipeline.drawing import Replay, Streams
from meshwright_pipeline.gradients import Sink, Sinks, connected
from meshwright_pipeline.losses import need_loss, plain_or_none, with_loss
from meshwright_pipeline.profiling import Profile, Profiler
from meshwright_pipeline.runtime import Runtime, Step
from meshwright_pipeline.stage import Stage
from meshwright_pipeline.tied import TiedSum
from meshwright_pipeline.transport import Transport
from meshwright_pipeline.trees import leaves_of, tensors_of
from meshwright_pipeline.units import Ownership

MAX_SIGNATURES = 64
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


class PipelinedCall:
    """Takes the place of the call of a model.

    Args:
        model: the model, emptied of what other ranks hold.
        skeleton: its structure (see skeleton.skeleton).
        owned: which stage holds what.
        schedule, timetable: what runs when.
        shape: ranks, stages, microbatches.
        tied: parameters that several ranks hold.
        place: where this rank stands.
        keep_outputs: a step returns everything on every rank, not the loss alone.
        split: see Runtime.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        owned: Ownership,
        schedule: Schedule,
        table: Timetable,
        shape: Shape,
        tied: TiedSum,
        place: Place,
        keep_outputs: bool,
        split: bool = True,
    ) -> None:
        self._model = weakref.ref(model)  # it keeps us
        self.owned, self.schedule, self.table, self.shape = owned, schedule, table, shape
        self.tied, self.place, self.keep_outputs, self.split = tied, place, keep_outputs, split
        self.skeleton = skeleton
        self.transport = Transport(place.group, place.device)
        self.agreement = Agreement(place.everyone, place.device)
        self.sinks = Sinks(model, place.plain)
        self.rank = dist.get_rank(place.group)
        self.ours: Mapping[nn.Module, frozenset[int]] = {}
        self.last: Step | None = None
        self._known: dict[Any, Prepared] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError(
            "a pipelined model cannot be copied: each rank holds only its stages; build another model and parallelize that"
        )

    def hooks_are_ours(self, known: Mapping[nn.Module, frozenset[int]]) -> None:
        """From now on, forward hooks that are on modules now and not among `known` count as meshwright's own."""
        self.ours = {
            part: frozenset(hooks_of(part)) - known.get(part, frozenset()) for part in self.model.modules()
        }

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    # ---- the call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; see `meshwright_parallel.parallelize` for what goes in and comes out.

        Raises:
            UsageError: the batch cannot be cut, or the model computes no loss.
            StageError: a stage failed; on every rank.
        """
        if any(hasattr(x, "get_seq_length") for x in leaves_of((args, kwargs))):
            raise UnsupportedError(
                "a pipelined model was given a cache of keys and values, which it would fill on one stage only; generate with "
                "use_cache=False, or from an exported model"
            )
        if self.place.plain:  # of a loader that lays batches over the mesh of the stage, one rank
            args, kwargs = pytree.tree_map_only(GlobalTensor, lambda t: t.to_local(), (args, kwargs))
        calls = microbatches(args, kwargs, self.shape.microbatches)
        training = torch.is_grad_enabled()
        prepared = self._prepared(calls[0], (args, kwargs), training)
        if training:
            return self._step(prepared, calls)
        return self._evaluate(prepared, calls)

    def _step(self, prepared: Prepared, calls: list[Call]) -> Any:
        need_loss(prepared.profile.output)
        divided_by = self._divisors(prepared, calls)
        weight = 1.0 / len(calls)
        losses: dict[int, torch.Tensor] = {}
        results: dict[int, Any] = {}

        def seed(microbatch: int, result: Any) -> torch.Tensor:
            loss = need_loss(result)
            local = loss.full_tensor() if isinstance(loss, GlobalTensor) else loss
            weighted = local * weight
            losses[microbatch] = weighted.detach()
            if self.keep_outputs:
                results[microbatch] = _detached(result)
            return weighted

        with self.sinks.active(), self._drawing(prepared.streams):
            step = prepared.runtime.run(self.table.ranks[self.rank], calls, seed, divided_by)
        self.last = step
        total = self._agree(step, losses)
        gradients = {name: (sink, gradient) for name, sink, gradient in self.sinks.take()}
        summed = self.tied.sum(
            {name: gradient for name, (_, gradient) in gradients.items()},
            {name: sink.leaf for name, (sink, _) in gradients.items()},
            {name: sink.dtype for name, (sink, _) in gradients.items()},
        )
        held: list[tuple[Sink, torch.Tensor | None]] = [
            (sink, summed[name]) for name, (sink, _) in gradients.items()
        ]
        loss = self._shown(connected(total, held, self._settle_later))
        if self.keep_outputs:
            everything = self._spread(results, calls, prepared.profile.output)
            return with_loss(everything, loss, keep=True)
        return with_loss(prepared.profile.output, loss, keep=False)

    def _divisors(self, prepared: Prepared, calls: list[Call]) -> list[float]:
        """Those of the averaging losses, on the rank of the last stage; none where microbatches count alike."""
        ignored, last = prepared.profile.losses, prepared.runtime.stages.get(self.shape.stages - 1)
        if last is None or not ignored or len(calls) == 1 or not may_differ(tensors_of(calls), ignored):
            return []
        return divisors([last.count(*call) for call in calls]) or []

    @contextlib.contextmanager
    def _drawing(self, streams: Streams | None) -> Iterator[None]:
        """Inside, random numbers are those of one device."""
        if streams is None:
            yield
            return
        own = self.schedule.own(self.rank, self.shape)
        streams.begin({unit for stage in own for unit in self.owned.stages[stage]})
        try:
            with Replay(streams):
                yield
        finally:
            streams.end()

    def _settle_later(self) -> None:
        """When this backward pass and the reductions that follow it have ended, make copies of tied parameters equal."""
        if self.place.mesh is None or self.place.mesh.size() == 1:
            return

        def settle() -> None:
            self.tied.settle(dict(self.model.named_parameters()))

        # queued from inside a callback, so that it comes behind those that gradients have queued meanwhile
        at_end_of_backward(lambda: at_end_of_backward(settle))

    def _evaluate(self, prepared: Prepared, calls: list[Call]) -> Any:
        forwards = _forwards_only(self.table.ranks[self.rank])
        divided_by = self._divisors(prepared, calls)
        with self._drawing(prepared.streams):
            step = prepared.runtime.run(forwards, calls, None, divided_by)
        self.last = step
        self._agree(step, {})
        return self._spread(
            {m: _detached(result) for m, result in step.results.items()}, calls, prepared.profile.output
        )

    def _shown(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as the user sees it: over the mesh of the stage, where values are."""
        mesh = self.place.mesh
        return loss if mesh is None else distribute(loss, mesh, ["I"] * mesh.ndim)

    # ---- what ranks tell each other at the end
    def _agree(self, step: Step, losses: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The loss, the same on every rank; or an error on every rank."""
        failure, failed, mine = step.failure, None, (0.0, 0.0)
        if failure is not None:
            rank = dist.get_rank()
            if failure.lost:
                owner = self.schedule.owner(failure.action.stage, self.shape)
                rank = dist.get_global_rank(self.place.group, owner)
            reason = f"{type(failure.error).__name__}: {failure.error}"
            failed = Report(failure.action, rank, reason, int(failure.lost), self.table.ends[failure.action])
        elif losses and self.place.speaks:
            total = sum(losses[m] for m in sorted(losses))
            assert isinstance(total, torch.Tensor)
            mine = float(total.double()), float(DTYPES.index(total.dtype))
        told = self.agreement.settle(mine, failed, self._last_of)
        if isinstance(told, Report):
            self.sinks.forget()
            self._known.clear()  # cuts may be half announced
            cause = None if failure is None else failure.error
            raise StageError(
                told.action.stage, told.action.microbatch, NAMES[told.action.kind], told.rank, told.reason
            ) from cause
        return torch.tensor(told[0], dtype=DTYPES[int(told[1])], device=self.place.device)

    def _last_of(self, rank: int) -> Action:
        """The action that ends a step on a rank of the run: the axis of the pipeline is the outermost."""
        return self.table.ranks[rank * self.shape.ranks // dist.get_world_size()][-1]

    def _spread(self, results: Mapping[int, Any], calls: list[Call], like: Any) -> Any:
        """The results of all microbatches, joined, from the rank of the last stage to all of the axis."""
        rows = rows_of(*calls[0])
        owner = self.schedule.owner(self.shape.stages - 1, self.shape)
        leaves, spec = pytree.tree_flatten(like)
        told: list[Any] = [None]
        if self.rank == owner:
            whole = joined([results[m] for m in sorted(results)], rows)
            leaves, spec = pytree.tree_flatten(
                pytree.tree_map_only(GlobalTensor, lambda t: t.full_tensor(), whole)
            )
            same = len(leaves) == len(leaves_of(like))
            told = [
                [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in leaves]
                if same
                else None
            ]
        source = dist.get_global_rank(self.place.group, owner)
        dist.broadcast_object_list(told, src=source, group=self.place.group, device=self.place.device)
        if told[0] is None:
            raise UnsupportedError(
                "the model returned something else than when it was profiled; ask for tensors only (use_cache=False, say)"
            )
        for place, sketch in enumerate(told[0]):
            if sketch is None:
                leaves[place] = plain_or_none(leaves[place])
                continue
            if self.rank != owner:
                leaves[place] = torch.empty(sketch[0], dtype=sketch[1], device=self.place.device)
            value = leaves[place].contiguous()
            dist.broadcast(value, src=source, group=self.place.group)
            leaves[place] = value if self.place.mesh is None else self._shown(value)
        return pytree.tree_unflatten(leaves, spec)

    # ---- what depends on the shapes of a batch
    def _prepared(self, call: Call, whole: Call, training: bool) -> Prepared:
        key = (signature(call), training, self.model.training)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_SIGNATURES:
                self._known.pop(next(iter(self._known)))
            found = self._known[key] = self._prepare(call, whole)
        return found

    def _prepare(self, call: Call, whole: Call) -> Prepared:
        for ours, copied in zip(self.model.modules(), self.skeleton.modules(), strict=True):
            copied.training = ours.training
        profiler = Profiler(self.skeleton, self.owned.units)
        profile = profiler.run(*self._whole(call))
        streams = None
        if profile.draws:
            draws = profile.draws if self.shape.microbatches == 1 else profiler.run(*self._whole(whole)).draws
            streams = Streams(draws, self.shape.microbatches)
        made = cut(profile, self.owned)
        stages = {
            index: Stage(self.model, self.owned.units, index, made, profile, self.ours, streams)
            for index in self.schedule.own(self.rank, self.shape)
        }
        mesh = None if self.place.plain else self.place.mesh
        runtime = Runtime(stages, self.shape, self.schedule, self.table, self.transport, mesh, self.split)
        return Prepared(runtime, profile, streams)

    def _whole(self, call: Call) -> Call:
        """Global values as ordinary tensors, in the dtype that they are computed in."""
        dtype = self.place.dtype

        def one(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.full_tensor() if isinstance(tensor, GlobalTensor) else tensor
            return whole.to(dtype) if whole.dtype == torch.float32 else whole

        changed: Call = pytree.tree_map_only(torch.Tensor, one, call)
        return changed


@dataclass(frozen=True)
class Prepared:
    """What batches of one signature are run with."""

    runtime: Runtime
    profile: Profile
    streams: Streams | None


def _forwards_only(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(action for action in actions if action.kind == "F")


def _detached(result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), result)
