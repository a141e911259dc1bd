"""`model(**batch)` of a pipelined model: one step of the schedule, inside the call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor.errors import StageError, UnsupportedError, UsageError
from meshwright_dtensor.random import without_pieces
from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import at_end_of_backward, hooks_of, pytree
from meshwright_pipeline.analysis.loss_additivity import INPUT_GRADIENT, OUTPUTS_UNPROVEN, Additivity
from meshwright_pipeline.partition.units import Ownership
from meshwright_pipeline.pytrees import leaves_of
from meshwright_pipeline.runtime.broadcast import Lost
from meshwright_pipeline.runtime.consensus import Mates
from meshwright_pipeline.runtime.executor import Running, Step
from meshwright_pipeline.runtime.full_batch_tail import Ran
from meshwright_pipeline.runtime.grad_handover import Sink, Sinks, connected, loss_only, returned
from meshwright_pipeline.runtime.input_grads import Inputs
from meshwright_pipeline.runtime.p2p import Transport
from meshwright_pipeline.runtime.p2p_step import Failure
from meshwright_pipeline.runtime.prepare import Prepared, Preparing
from meshwright_pipeline.runtime.schedule_warning import Surprise
from meshwright_pipeline.runtime.step_end import Ending, Place
from meshwright_pipeline.runtime.tied_grads import TiedSum
from meshwright_pipeline.trace.loss import loss_of, need_loss, with_loss
from meshwright_pipeline.trace.loss_denominators import Denominators, sum_denominators
from meshwright_pipeline.trace.microbatch import Call, describe, microbatches
from meshwright_pipeline.trace.rng_replay import ReplayMode, RngReplay, StepDraws

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Work:
    """One call: its microbatches, the batch in words, and what it is run with.

    `adding`: how the loss follows from those of microbatches, so that their backward passes may begin before the last forward has
    ended; None where it does not. `numbers`: what those are given. `inputs`: those with a gradient, None where there are none.
    """

    calls: list[Call]
    whole: Call
    batch: str
    prepared: Prepared
    numbers: Denominators | None
    adding: Additivity | None
    inputs: Inputs | None


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
        surprise: says what the first step finds out.
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
        surprise: Surprise,
        split: bool = True,
    ) -> None:
        self._model = weakref.ref(model)  # it keeps us
        self.owned, self.schedule, self.table, self.shape = owned, schedule, table, shape
        self.tied, self.place, self.keep_outputs, self.surprise = tied, place, keep_outputs, surprise
        transport = Transport(place.group, place.device)
        mesh = None if place.plain else place.mesh
        self.preparing = Preparing(
            skeleton, owned, schedule, table, shape, transport, mesh, place.dtype, split
        )
        self.ending = Ending(place, schedule, table, shape)
        self.mates = Mates(mesh, place.device)
        self.sinks = Sinks(model, place.plain)
        self.rank = dist.get_rank(place.group)
        self.last: Step | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError(
            "a pipelined model cannot be copied: each rank holds only its stages; build another model and parallelize that"
        )

    def hooks_are_ours(self, known: Mapping[nn.Module, frozenset[int]]) -> None:
        """From now on, forward hooks that are on modules now and not among `known` count as meshwright's own."""
        self.preparing.ours = {
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

        Where the model returns a loss, its backward passes have run when the call returns. Where it returns none, and
        gradients are on, they run when a loss that is made of what it returned is differentiated.

        Raises:
            UsageError: the batch cannot be cut.
            StageError: a stage failed, or ranks were given different batches; on every rank.
        """
        training = torch.is_grad_enabled()
        try:
            work = self._work(args, kwargs, training)
        except Exception as error:  # of whatever kind, the other ranks may be waiting for this one
            self.mates.apart(None)
            with contextlib.suppress(StageError):
                self._stand_by(error)
            raise
        way = "" if training else " without gradients"
        apart = self.mates.apart(f"{work.batch}{way}", work.adding is not None)
        if apart is not None:
            self._stand_by(UsageError(apart or "another rank of this stage cannot begin"), told=bool(apart))
        return self._step(work, work.adding) if work.adding is not None else self._behind(work)

    def _work(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> _Work:
        if any(hasattr(x, "get_seq_length") for x in leaves_of((args, kwargs))):
            raise UnsupportedError(
                "a pipelined model was given a cache of keys and values, which it would fill on one stage only; generate with "
                "use_cache=False, or from an exported model"
            )
        if self.place.plain:  # of a loader that lays batches over the mesh of the stage, one rank
            args, kwargs = pytree.tree_map_only(GlobalTensor, lambda t: t.to_local(), (args, kwargs))
        inputs, count = None, self.shape.microbatches
        if training and Inputs.wanted((args, kwargs)):
            inputs = Inputs((args, kwargs), count, self.place.group)
            args, kwargs = inputs.whole
        calls = microbatches(args, kwargs, count) if inputs is None else inputs.calls
        prepared = self.preparing.prepared(self.model, calls[0], (args, kwargs), training)
        adding = self.preparing.adding(prepared, (args, kwargs)) if training else None
        why = prepared.unproven
        if adding is not None and inputs is not None:
            adding, why = None, INPUT_GRADIENT
        elif adding is not None and self.keep_outputs and not adding.whole:
            adding, why = None, OUTPUTS_UNPROVEN
        if training and why is not None:
            self.surprise.tell(why)
        if adding is None:
            self.preparing.tail(self.model, prepared, (args, kwargs))
        numbers = None if adding is None else self._numbers(prepared, adding, calls)
        return _Work(calls, (args, kwargs), describe((args, kwargs)), prepared, numbers, adding, inputs)

    def _stand_by(self, error: Exception, told: bool = True) -> None:
        """This rank cannot begin: it only keeps messages in step, and tells the others, where they are to be `told` by it.

        Raises:
            StageError: what went wrong first, on whichever rank.
        """
        failure = Failure(self.table.ranks[self.rank][0], error)
        running = Running(self.preparing.runtime({}), [], None, backward=False, failure=failure)
        found = running.run("forward").failure
        self.preparing.forget()
        self.ending.agree(found if told else None)

    def _step(self, work: _Work, adding: Additivity) -> Any:
        """Forwards and backwards, in the order of the schedule; the loss hands the gradients over."""
        output, weight = work.prepared.profile.output, adding.loss.weight(len(work.calls))
        losses: dict[int, Tensor] = {}
        results: dict[int, Any] = {}

        def ends(microbatch: int, result: Any) -> list[Tensor]:
            loss = need_loss(result)
            if microbatch == 0 and len(work.calls) > 1:
                work.prepared.sameness.check(self.model, loss)
            weighted = _whole(loss) * weight
            losses[microbatch] = weighted.detach()
            if self.keep_outputs:
                results[microbatch] = result
            return [weighted]

        running = Running(work.prepared.runtime, work.calls, ends, work.numbers, work.batch)
        with self.sinks.active(), self._drawing(work.prepared.streams):
            self.last = running.run("all")
        total = self._agree(losses, work.batch)
        self._tell_kept(work)
        sinks = self.sinks.trainable()
        gradients = self._summed(sinks)
        held = [(sink, gradient) for (_, sink), gradient in zip(sinks, gradients, strict=True)]
        loss = self.ending.shown(connected(total, held, self._settle_later))
        if not self.keep_outputs:
            return with_loss(output, loss, keep=False)
        leaves, differentiable = self.ending.tell(output, lambda: _joined(adding, results))
        shown = [
            self.ending.shown(loss_only(leaf) if has else leaf) if isinstance(leaf, Tensor) else leaf
            for leaf, has in zip(leaves, differentiable, strict=True)
        ]
        return with_loss(_like(output, shown), loss, keep=True)

    def _behind(self, work: _Work) -> Any:
        """All forwards, and what is behind the units once for the whole batch; backwards run when that is differentiated."""
        output, training = work.prepared.profile.output, torch.is_grad_enabled()
        only = training and not self.keep_outputs and loss_of(output) is not None
        like = loss_of(output) if only else output
        streams, sinks = work.prepared.streams, self.sinks.trainable()
        running = Running(work.prepared.runtime, work.calls, None, None, work.batch, backward=False)
        kept = work.prepared.profile.kept
        before = [None if value is None else value.clone() for value in kept.held(self.model)]
        ran: Ran | None = None
        made: list[Any] = []
        with self.sinks.active() if training else contextlib.nullcontext(), self._drawing(streams) as drawn:
            self.last = running.run("forward")
            if self._ends and self.last.failure is None:
                try:
                    kept.put(self.model, before)  # what is written there, the tail writes again
                    ran = self.preparing.tail(self.model, work.prepared, work.whole).run(
                        work.whole, self.last
                    )
                    given = need_loss(ran.result) if only else ran.result
                    made = [_whole(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(given)]
                    ran.result = given = None  # logits, say, that nobody is given
                except (
                    Exception
                ) as error:  # of whatever kind, the other ranks must come to the end of the step
                    self.last.failure = Failure(self._last_action("F"), error)
        self.last.behind.clear()
        self._agree({}, work.batch)
        self._tell_kept(work)
        leaves, differentiable = self.ending.tell(like, lambda: made)
        if not training:
            return _like(output, [self.ending.shown(x) if isinstance(x, Tensor) else x for x in leaves])
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places:
            raise UsageError(
                f"the model returned a {type(output).__name__} in which a pipeline finds no tensor; return tensors in tuples, "
                "dicts or dataclasses that torch's pytree knows"
            )

        def back(gradients: list[Tensor | None]) -> list[Tensor | None]:
            with self.sinks.active(), self._drawing(streams, drawn):
                shares: Mapping[int, Sequence[Tensor | None]] = {}
                if ran is not None:
                    try:
                        shares = ran.back([made[i] for i in places], gradients)
                    except Exception as error:  # as above
                        running.fail(Failure(self._last_action("BI"), error))
                self.last = running.run_back(shares)
            self._agree({})
            return self._summed(sinks, work.inputs)

        handed = returned(
            [leaves[i] for i in places],
            [differentiable[i] for i in places],
            [*(sink.leaf for _, sink in sinks), *(() if work.inputs is None else work.inputs.given)],
            back,
            self._settle_later,
        )
        for place, value in zip(places, handed, strict=True):
            leaves[place] = self.ending.shown(value)
        return with_loss(output, leaves[0], keep=False) if only else _like(output, leaves)

    def _tell_kept(self, work: _Work) -> None:
        """Give every rank the buffers and numbers outside of units as the last stage has written them."""
        kept = work.prepared.profile.kept
        if kept:
            # all ranks of a mesh gather them
            own = [x if x is None else x.to(self.place.device) for x in kept.held(self.model)]
            values, _ = self.ending.tell(own, lambda: own)
            if not self._ends:
                kept.put(self.model, values)

    @property
    def _ends(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.ending.source == self.rank

    def _last_action(self, kinds: str) -> Action:
        """The first of these actions on the last stage, which this rank holds."""
        last = self.shape.stages - 1
        return next(a for a in self.table.ranks[self.rank] if a.stage == last and a.kind in kinds)

    # ---- parts of a step
    def _numbers(self, prepared: Prepared, adding: Additivity, calls: list[Call]) -> Denominators | None:
        """What microbatches are given of the whole batch, on the rank of the last stage; None where they need nothing."""
        last = prepared.runtime.stages.get(self.shape.stages - 1)
        if last is None or len(calls) == 1 or not (adding.averaging or adding.fixed):
            return None
        parts = [last.count(*call, adding.fixed) for call in calls]
        return sum_denominators(parts, adding.averaging, adding.fixed)

    @contextlib.contextmanager
    def _drawing(
        self, streams: RngReplay | None, drawn: StepDraws | None = None
    ) -> Iterator[StepDraws | None]:
        """Inside, random numbers are those of one device: of a step that begins, or of the backward passes of one."""
        if streams is None:
            yield None
            return
        before = torch.get_rng_state()
        if drawn is None:
            own = self.schedule.own(self.rank, self.shape)
            now = streams.begin({unit for stage in own for unit in self.owned.stages[stage]})
        else:
            now = streams.back_to(drawn)
        try:
            with ReplayMode(streams), without_pieces():
                yield now
        finally:
            streams.forward(None)
            after = now.end if drawn is None else before
            if after is not None:
                torch.set_rng_state(after)

    def _agree(self, losses: Mapping[int, Tensor], batch: str = "") -> Tensor:
        """See Ending.agree; of what has failed nothing is kept."""
        assert self.last is not None
        try:
            return self.ending.agree(self.last.failure, losses, batch)
        except StageError:
            self.sinks.forget()
            self.preparing.forget()
            raise

    def _summed(self, sinks: Sequence[tuple[str, Sink]], inputs: Inputs | None = None) -> list[Tensor | None]:
        """The gradients of a step, those of tied parameters summed over the ranks that hold one; then those of inputs."""
        gradients = {name: sink.take() for name, sink in sinks}
        if not self.tied.any and inputs is None:
            return list(gradients.values())
        failure: Failure | None = None
        beside: list[Tensor | None] = []
        try:
            gradients = self.tied.sum(
                gradients,
                {name: sink.leaf for name, sink in sinks},
                {name: sink.dtype for name, sink in sinks},
            )
        except Lost as lost:
            failure = self.ending.lost(lost)
        if inputs is not None:  # also where that has failed: others wait for this rank
            try:
                beside = inputs.gradients()
            except Lost as lost:
                failure = failure or self.ending.lost(lost)
        self.ending.agree(failure)
        return [*(gradients[name] for name, _ in sinks), *beside]

    def _settle_later(self) -> None:
        """When this backward pass and the reductions that follow it have ended, make copies of tied parameters equal.

        Sums over two ranks, or none, have one order, and are equal.
        """
        if self.place.mesh is None or self.place.mesh.size() <= 2 or not self.tied.any:
            return

        def settle() -> None:
            failure = None
            try:
                self.tied.settle(dict(self.model.named_parameters()))
            except Lost as lost:
                failure = self.ending.lost(lost)
            self.ending.agree(failure)

        # queued from inside a callback, so that it comes behind those that gradients have queued meanwhile
        at_end_of_backward(lambda: at_end_of_backward(settle))


def _joined(adding: Additivity, results: Mapping[int, Any]) -> list[Any]:
    """The leaves of the result for the whole batch, from those of microbatches, on the rank of the last stage."""
    parts = [leaves_of(results[m]) for m in sorted(results)]
    if any(len(part) != len(adding.leaves) for part in parts):
        return []
    has = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in parts[0]]
    with torch.no_grad():
        whole = [[_whole(leaf) if isinstance(leaf, Tensor) else leaf for leaf in part] for part in parts]
        ways = [way for way in adding.leaves if way is not None]
        found = [way.join(column) for way, column in zip(ways, zip(*whole, strict=True), strict=True)]
    return [
        leaf.detach().requires_grad_() if one and isinstance(leaf, Tensor) else leaf
        for leaf, one in zip(found, has, strict=True)
    ]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, GlobalTensor) else tensor


def _like(tree: Any, leaves: Sequence[Any]) -> Any:
    """A tree of the same structure with other leaves."""
    return pytree.tree_unflatten(list(leaves), pytree.tree_flatten(tree)[1])
