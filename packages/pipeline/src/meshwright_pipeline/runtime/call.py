"""`model(**batch)` of a pipelined model: one step of the schedule, inside the call."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import StageError, UnsupportedError, UsageError
from meshwright_dtensor.model.batch_text import BatchTexts
from meshwright_dtensor.random import without_pieces
from meshwright_dtensor.schedule.schedule import Action
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import at_end_of_backward, hooks_of, pytree
from meshwright_pipeline.analysis.loss_additivity import (
    INPUT_GRADIENT,
    OUTPUTS_UNPROVEN,
    Additivity,
    Leaf,
    Reason,
)
from meshwright_pipeline.partition.units import Ownership
from meshwright_pipeline.pytrees import leaves_of
from meshwright_pipeline.runtime.agreement import RankContext, RankLost, StageRanks, StepEnd
from meshwright_pipeline.runtime.executor import StepOutcome, StepRun
from meshwright_pipeline.runtime.full_batch_tail import TailRun
from meshwright_pipeline.runtime.grad_handover import Sink, Sinks, connected, not_differentiable
from meshwright_pipeline.runtime.input_grads import InputGradients
from meshwright_pipeline.runtime.p2p import Transport
from meshwright_pipeline.runtime.p2p_step import Failure
from meshwright_pipeline.runtime.prepare import Preparation, Prepared
from meshwright_pipeline.runtime.schedule_warning import ScheduleWarning
from meshwright_pipeline.runtime.tied_grads import TiedSum
from meshwright_pipeline.trace.loss import loss_of, need_loss, with_loss
from meshwright_pipeline.trace.loss_denominators import Denominators, sum_denominators
from meshwright_pipeline.trace.microbatch import Call, microbatches
from meshwright_pipeline.trace.rng_replay import ReplayMode, RngReplay, StepDraws
from meshwright_pipeline.trace.state_writes import WrittenState

Tensor = torch.Tensor
LossMode = Literal["per_microbatch", "full_batch"]
"""Where the loss is computed: for each microbatch, so that backwards run in the order of the schedule; or once for the
whole batch, after the forwards of all microbatches. Then backwards run when the results are differentiated."""


@dataclass(frozen=True)
class StepPlan:
    """One call of the model, ready to run.

    Attributes:
        calls: the microbatches. `whole`: the batch. `batch`: the same in words.
        prepared: profile, stages and random numbers for its shapes.
        training: gradients are on.
        loss_mode: where the loss is computed.
        returns: the caller gets the loss alone, or all outputs.
        weight, leaves: in "per_microbatch", how the loss and all outputs follow from those of microbatches.
        numbers: loss denominators of the whole batch, where microbatches need them.
        inputs: inputs that require a gradient; None where there are none.
    """

    calls: list[Call]
    whole: Call
    batch: str
    prepared: Prepared
    training: bool
    loss_mode: LossMode
    returns: Literal["loss", "all"]
    weight: float = 1.0
    leaves: tuple[Leaf | None, ...] = ()
    numbers: Denominators | None = None
    inputs: InputGradients | None = None

    @property
    def output(self) -> Any:
        """The result of the model in the profile."""
        return self.prepared.profile.output


@dataclass
class StepResult:
    """What the actions of a step leave on this rank; values on the rank of the last stage only.

    Attributes:
        run: the step, whose backwards may still have to run.
        failure: the first error on this rank.
        loss: the loss of the batch, in "per_microbatch".
        outputs: the leaves to return: ordinary tensors, which require a gradient where they have one.
        tail: the code after the last unit, which has run, in "full_batch".
        drawn: the random numbers of the step.
    """

    plan: StepPlan
    run: StepRun
    failure: Failure | None = None
    loss: Tensor | None = None
    outputs: list[Any] = field(default_factory=list)
    tail: TailRun | None = None
    drawn: StepDraws | None = None


class PipelinedCall:
    """Takes the place of the call of a model: prepare, execute, finish.

    Args:
        model: the model, without the memory of other stages.
        skeleton: its structure on the meta device.
        owned: which stage holds which units.
        table: the schedule.
        tied: parameters that several ranks hold.
        context: the position of this rank.
        keep_outputs: a training step returns all outputs on every rank, not the loss alone.
        warning: warns where the schedule cannot be followed.
        split: see RankStages.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        owned: Ownership,
        table: Timetable,
        tied: TiedSum,
        context: RankContext,
        keep_outputs: bool,
        warning: ScheduleWarning,
        split: bool = True,
    ) -> None:
        # the model holds this object
        self._model = weakref.ref(model)
        self.owned, self.table = owned, table
        self.tied, self.context, self.keep_outputs, self.warning = tied, context, keep_outputs, warning
        transport = Transport(context.group, context.device)
        mesh = None if context.plain else context.mesh
        self.preparation = Preparation(skeleton, owned, table, transport, mesh, context.dtype, split)
        self.end = StepEnd(context, table)
        self.stage_ranks = StageRanks(mesh, context.device)
        self.sinks = Sinks(model, context.plain)
        self.rank = transport.rank
        self.last: StepOutcome | None = None
        self.texts = BatchTexts()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError(
            "a pipelined model cannot be copied: each rank holds only its stages; build another model and parallelize that"
        )

    def claim_hooks(self, before: Mapping[nn.Module, frozenset[int]]) -> None:
        """Count the forward hooks that modules have now and did not have `before` as meshwright's own."""
        self.preparation.own_hooks = {
            module: frozenset(hooks_of(module)) - before.get(module, frozenset())
            for module in self.model.modules()
        }

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; see `meshwright_parallel.parallelize` for its arguments and results.

        Where the model returns a loss, its backward passes have run when the call returns. Where it returns none, and
        gradients are on, they run when a loss computed from its results is differentiated.

        Raises:
            UsageError: the batch cannot be split.
            StageError: a stage failed, or ranks were given different batches; on every rank.
        """
        try:
            plan = self.prepare((args, kwargs))
        except Exception as error:
            # of any kind: the other ranks may be waiting for this one
            self.stage_ranks.refusal(None)
            with contextlib.suppress(StageError):
                self._stand_by(error)
            raise
        mode = "" if plan.training else " without gradients"
        refusal = self.stage_ranks.refusal(f"{plan.batch}{mode}", plan.loss_mode == "per_microbatch")
        if refusal is not None:
            reason = refusal or "another rank of this stage cannot begin"
            self._stand_by(UsageError(reason), report=bool(refusal))
        return self.finish(self.execute(plan))

    def _stand_by(self, error: Exception, report: bool = True) -> None:
        """Only exchange messages in this step, since this rank cannot begin.

        Args:
            report: tell the other ranks about `error`; False where a rank of the stage does.

        Raises:
            StageError: the first failure, on whichever rank.
        """
        failure = Failure(self.table.ranks[self.rank][0], error)
        outcome = StepRun(self.preparation.rank_stages({}), [], None, failure=failure).run()
        self.preparation.forget()
        self.end.agree(outcome.failure if report else None)

    # ---- prepare
    def prepare(self, batch: Call) -> StepPlan:
        """Split a batch into microbatches, and decide how its loss is computed."""
        text, _ = self.texts.describe(*batch)
        if any(hasattr(leaf, "get_seq_length") for leaf in leaves_of(batch)):
            raise UnsupportedError(
                "a pipelined model was given a cache of keys and values, which it would fill on one stage only; generate with "
                "use_cache=False, or from an exported model"
            )
        training, count = torch.is_grad_enabled(), self.table.shape.microbatches
        # a loader may distribute batches over the mesh of the stage, even one of one rank
        if self.context.plain:
            batch = pytree.tree_map_only(GlobalTensor, lambda t: t.to_local(), batch)
        inputs = None
        if training and InputGradients.wanted(batch):
            inputs = InputGradients(batch, count, self.context.group)
            batch = inputs.whole
        calls = microbatches(*batch, count) if inputs is None else inputs.calls
        prepared = self.preparation.prepared(self.model, calls[0], batch, training)
        has_loss = loss_of(prepared.profile.output) is not None
        returns: Literal["loss", "all"] = "loss" if training and has_loss and not self.keep_outputs else "all"
        if training:
            additivity = self._additivity(prepared, batch, inputs)
            if isinstance(additivity, Additivity):
                numbers = self._numbers(prepared, additivity, calls)
                weight = additivity.loss.weight(count)
                return StepPlan(
                    calls, batch, text, prepared, True, "per_microbatch", returns,
                    weight, additivity.leaves, numbers,
                )  # fmt: skip
            self.warning.warn(additivity)
        self.preparation.tail(self.model, prepared, batch)
        return StepPlan(calls, batch, text, prepared, training, "full_batch", returns, inputs=inputs)

    def _additivity(
        self, prepared: Prepared, batch: Call, inputs: InputGradients | None
    ) -> Additivity | Reason:
        """How the results follow from those of microbatches, or why the step needs the full batch."""
        additivity = self.preparation.additivity(prepared, batch)
        if isinstance(additivity, Reason):
            return additivity
        if inputs is not None:
            return INPUT_GRADIENT
        return OUTPUTS_UNPROVEN if self.keep_outputs and not additivity.whole else additivity

    def _numbers(self, prepared: Prepared, additivity: Additivity, calls: list[Call]) -> Denominators | None:
        """Loss denominators of the whole batch, on the rank of the last stage; None where microbatches need none."""
        last = prepared.stages.stages.get(self.table.shape.stages - 1)
        if last is None or len(calls) == 1 or not (additivity.averaging or additivity.fixed):
            return None
        parts = [last.count(*call, additivity.fixed) for call in calls]
        return sum_denominators(parts, additivity.averaging, additivity.fixed)

    # ---- execute
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the actions of this rank; in "full_batch", the forwards, and the code after the last unit."""
        losses: dict[int, Tensor] = {}
        results: dict[int, Any] = {}

        def start_backward(microbatch: int, result: Any) -> list[Tensor]:
            loss = need_loss(result)
            if microbatch == 0 and len(plan.calls) > 1:
                plan.prepared.sameness.check(self.model, loss)
            weighted: Tensor = _full(loss) * plan.weight
            losses[microbatch] = weighted.detach()
            if plan.returns == "all":
                results[microbatch] = result
            return [weighted]

        per_microbatch = plan.loss_mode == "per_microbatch"
        start = start_backward if per_microbatch else None
        run = StepRun(plan.prepared.stages, plan.calls, start, plan.numbers, plan.batch)
        step, state = StepResult(plan, run), plan.prepared.profile.kept
        before = [] if per_microbatch else [x if x is None else x.clone() for x in state.held(self.model)]
        sinks = self.sinks.active() if plan.training else contextlib.nullcontext()
        with sinks, self._random_numbers(plan.prepared.streams) as step.drawn:
            self.last = run.run()
            if self._has_last_stage and self.last.failure is None and not run.input_missing:
                try:
                    if per_microbatch:
                        step.loss = functools.reduce(torch.add, [losses[m] for m in sorted(losses)])
                        step.outputs = _joined(plan.leaves, results) if plan.returns == "all" else []
                    else:
                        # the tail writes again what the forwards wrote
                        state.put(self.model, before)
                        step.tail, step.outputs = self._run_tail(plan, self.last)
                except Exception as error:
                    # of any kind: the other ranks must come to the end of the step
                    self.last.failure = Failure(self._last_stage_action("F"), error)
        self.last.unit_outputs.clear()
        step.failure = self.last.failure
        return step

    def _run_tail(self, plan: StepPlan, outcome: StepOutcome) -> tuple[TailRun, list[Any]]:
        """Run the code after the last unit on the whole batch. Returns also the leaves that the caller gets."""
        tail = self.preparation.tail(self.model, plan.prepared, plan.whole)
        tail_run, result = tail.run(plan.whole, outcome)
        returned = need_loss(result) if plan.returns == "loss" else result
        return tail_run, [_full(leaf) for leaf in leaves_of(returned)]

    @contextlib.contextmanager
    def _random_numbers(
        self, streams: RngReplay | None, drawn: StepDraws | None = None
    ) -> Iterator[StepDraws | None]:
        """Inside, random numbers are those of one device: of a new step, or of the backwards of the step `drawn`."""
        if streams is None:
            yield None
            return
        before = torch.get_rng_state()
        if drawn is None:
            stages = self.table.schedule.own(self.rank, self.table.shape)
            current = streams.begin({unit for stage in stages for unit in self.owned.stages[stage]})
        else:
            current = streams.back_to(drawn)
        try:
            with ReplayMode(streams), without_pieces():
                yield current
        finally:
            streams.forward(None)
            after = current.end if drawn is None else before
            if after is not None:
                torch.set_rng_state(after)

    @property
    def _has_last_stage(self) -> bool:
        return self.end.last_stage_rank == self.rank

    def _last_stage_action(self, kinds: str) -> Action:
        """The first action of these kinds on the last stage, which this rank holds."""
        last = self.table.shape.stages - 1
        return next(a for a in self.table.ranks[self.rank] if a.stage == last and a.kind in kinds)

    # ---- finish
    def finish(self, step: StepResult) -> Any:
        """Agree with all ranks on the step, share its results, and return what the caller gets.

        Raises:
            StageError: a rank failed; on every rank.
            UnsupportedError: the model returned something else than in the profile; on every rank.
        """
        plan, per_microbatch = step.plan, step.plan.loss_mode == "per_microbatch"
        loss = self._agree(step.failure, step.loss, plan.batch)
        state = plan.prepared.profile.kept
        written = [x if x is None else x.to(self.context.device) for x in state.held(self.model)]
        returned = loss_of(plan.output) if plan.returns == "loss" else plan.output
        expected = [] if per_microbatch and plan.returns == "loss" else pytree.tree_leaves(returned)
        sinks = self.sinks.trainable() if plan.training else {}
        gradients, values, differentiable = self._share(
            sinks if per_microbatch else None, None, [*written, *expected], [*written, *step.outputs]
        )
        self._write_state(state, values[: len(written)])
        leaves, differentiable = values[len(written) :], differentiable[len(written) :]
        if not plan.training:
            return _like(plan.output, map(self._shown, leaves))
        if per_microbatch:
            backward = functools.partial(_scaled, gradients)
            targets = [sink.leaf for sink in sinks.values()]
            (loss,) = map(self._shown, connected([loss], [True], targets, backward, self._equalize_later))
            if plan.returns == "loss":
                return with_loss(plan.output, loss, keep=False)
            pairs = zip(leaves, differentiable, strict=True)
            outputs = [self._shown(not_differentiable(leaf) if has else leaf) for leaf, has in pairs]
            return with_loss(_like(plan.output, outputs), loss, keep=True)
        outputs = self._connect(step, sinks, leaves, differentiable)
        if plan.returns == "loss":
            return with_loss(plan.output, outputs[0], keep=False)
        return _like(plan.output, outputs)

    def _connect(
        self, step: StepResult, sinks: dict[str, Sink], leaves: list[Any], differentiable: list[bool]
    ) -> list[Any]:
        """The results of a step in "full_batch", whose backwards run when they are differentiated."""
        plan, places = step.plan, [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places:
            raise UsageError(
                f"the model returned a {type(plan.output).__name__} in which a pipeline finds no tensor; return tensors in "
                "tuples, dicts or dataclasses that torch's pytree knows"
            )

        def backward(gradients: list[Tensor | None]) -> list[Tensor | None]:
            with self.sinks.active(), self._random_numbers(plan.prepared.streams, step.drawn):
                unit_gradients: Mapping[int, Sequence[Tensor | None]] = {}
                if step.tail is not None:
                    try:
                        unit_gradients = step.tail.backward([step.outputs[i] for i in places], gradients)
                    except (
                        Exception
                        # of any kind: the other ranks must come to the end of the step
                    ) as error:
                        step.run.fail(Failure(self._last_stage_action("BI"), error))
                self.last = step.run.run_backward(unit_gradients)
            return self._share(sinks, plan.inputs, failure=self.last.failure, agree=True)[0]

        results = connected(
            [leaves[i] for i in places],
            [differentiable[i] for i in places],
            [*(sink.leaf for sink in sinks.values()), *(plan.inputs.given if plan.inputs else ())],
            backward,
            self._equalize_later,
        )
        outputs = list(leaves)
        for place, result in zip(places, results, strict=True):
            outputs[place] = self._shown(result)
        return outputs

    def _write_state(self, state: WrittenState, values: list[Any]) -> None:
        """Write the buffers and numbers outside of units as the last stage has them."""
        if state and not self._has_last_stage:
            state.put(self.model, values)

    def _share(
        self,
        sinks: dict[str, Sink] | None,
        inputs: InputGradients | None,
        expected: Sequence[Any] = (),
        values: Sequence[Any] = (),
        failure: Failure | None = None,
        agree: bool = False,
    ) -> tuple[list[Tensor | None], list[Any], list[bool]]:
        """Sum the gradients that several ranks hold and broadcast values of the last stage, with one agreement at the end.

        Each part runs even where an earlier one failed, since other ranks wait for this one.

        Args:
            sinks, inputs: whose gradients to sum; None for none.
            expected, values: see StepEnd.broadcast.
            failure: of this rank in the actions before; then `agree` on it even where nothing is shared.

        Returns: the gradients, of parameters and then of inputs; the broadcast values; which of them have a gradient.
        """
        gradients = {name: sink.take() for name, sink in (sinks or {}).items()}
        of_inputs: list[Tensor | None] = []
        received: tuple[list[Any], list[bool]] | None = ([], [])
        if sinks is not None and self.tied.any:
            agree = True
            try:
                dtypes = {name: sink.dtype for name, sink in sinks.items()}
                self.tied.sum(gradients, {name: sink.leaf for name, sink in sinks.items()}, dtypes)
            except RankLost as lost:
                failure = failure or self.end.failure_of(lost)
        if inputs is not None:
            agree = True
            try:
                of_inputs = inputs.gradients()
            except RankLost as lost:
                failure = failure or self.end.failure_of(lost)
        if expected:
            agree = True
            try:
                received = self.end.broadcast(expected, values)
            except RankLost as lost:
                failure = failure or self.end.failure_of(lost)
        if agree:
            self._agree(failure)
        if received is None:
            raise UnsupportedError(
                "the model returned something else than when it was profiled; return tensors only (use_cache=False, say)"
            )
        return [*gradients.values(), *of_inputs], *received

    def _agree(self, failure: Failure | None, loss: Tensor | None = None, batch: str = "") -> Tensor:
        """See StepEnd.agree. After a failure nothing of the step is kept."""
        try:
            return self.end.agree(failure, loss, batch)
        except StageError:
            self.sinks.forget()
            self.preparation.forget()
            raise

    def _equalize_later(self) -> None:
        """After this backward pass and its gradient reductions, make the gradients of tied parameters equal.

        Not needed for reductions over at most two ranks, which have only one order.
        """
        if self.context.mesh is None or self.context.mesh.size() <= 2 or not self.tied.any:
            return

        def equalize() -> None:
            failure = None
            try:
                self.tied.equalize(dict(self.model.named_parameters()))
            except RankLost as lost:
                failure = self.end.failure_of(lost)
            self.end.agree(failure)

        # queued from inside a callback, so that it runs after the callbacks that gradients have queued meanwhile
        at_end_of_backward(lambda: at_end_of_backward(equalize))

    def _shown(self, value: Any) -> Any:
        """A result as the caller sees it: replicated over the mesh of the stage, where there is one."""
        mesh = self.context.mesh
        if mesh is None or not isinstance(value, Tensor):
            return value
        return distribute(value, mesh, ["I"] * mesh.ndim)


def _scaled(gradients: list[Tensor | None], of_loss: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a step, scaled in place by the gradient of its loss."""
    (scale,) = of_loss
    if scale is None:
        return [None] * len(gradients)
    return [None if gradient is None else gradient.mul_(scale.to(gradient.dtype)) for gradient in gradients]


def _joined(joins: Sequence[Leaf | None], results: Mapping[int, Any]) -> list[Any]:
    """The leaves of the result for the whole batch, from those of microbatches; [] where they are not as expected."""
    parts = [leaves_of(results[m]) for m in sorted(results)]
    if any(len(part) != len(joins) for part in parts):
        return []
    differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in parts[0]]
    with torch.no_grad():
        columns = zip(*([_full(leaf) for leaf in part] for part in parts), strict=True)
        leaves = [join.join(column) for join, column in zip(joins, columns, strict=True) if join is not None]
    return [
        leaf.detach().requires_grad_() if has and isinstance(leaf, Tensor) else leaf
        for leaf, has in zip(leaves, differentiable, strict=True)
    ]


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, GlobalTensor) else value


def _like(tree: Any, leaves: Iterable[Any]) -> Any:
    """A tree of the same structure with other leaves."""
    return pytree.tree_unflatten(list(leaves), pytree.tree_flatten(tree)[1])
