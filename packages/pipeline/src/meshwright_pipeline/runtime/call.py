"""`model(**batch)` of a pipelined model: one step of the schedule, inside the call."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from meshwright_dtensor._torch.modes import functorch_active, without_inference_mode
from meshwright_dtensor.api import distribute
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.errors import StageError, UnsupportedError, UsageError
from meshwright_dtensor.model.batch_text import BatchTexts, with_random_state
from meshwright_dtensor.model.compiled import refuse_traced_call
from meshwright_dtensor.model.device import random_kept_on_error
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.stages.whole_model import own_stages, whole_model_of
from meshwright_dtensor.tensor.compute_copy import forwards_of_one_step
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.tensor.staged import refuse_copied_stages
from meshwright_dtensor.trace.one_device import on_one_device
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.analysis import loss_additivity
from meshwright_pipeline.partition.units import Ownership
from meshwright_pipeline.pytrees import leaves_of
from meshwright_pipeline.runtime.actions.executor import StepOutcome, StepRun
from meshwright_pipeline.runtime.agreement import RankContext, RankLost, StageRanks
from meshwright_pipeline.runtime.grad_handover import Sink, Sinks, connected, not_differentiable
from meshwright_pipeline.runtime.input_grads import InputGradients
from meshwright_pipeline.runtime.p2p.step import Failure
from meshwright_pipeline.runtime.prepare import Preparation
from meshwright_pipeline.runtime.results.left_tensors import LeftTensors
from meshwright_pipeline.runtime.results.step_output import with_loss
from meshwright_pipeline.runtime.schedule_warning import ScheduleWarning
from meshwright_pipeline.runtime.settings import Settings
from meshwright_pipeline.runtime.step_end import StepEnd
from meshwright_pipeline.runtime.step_execution import StepExecution
from meshwright_pipeline.runtime.step_plan import StepPlan, StepResult
from meshwright_pipeline.runtime.tied_grads import TiedFlags, TiedSum
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.microbatch import Call, microbatches, padded
from meshwright_pipeline.trace.state.state_writes import WrittenState

Tensor = torch.Tensor


class PipelinedCall:
    """Takes the place of the call of a model: prepare, execute, finish.

    Args:
        model: without the memory of other stages. `skeleton`: its structure on the meta device.
        tied, flags: parameters that several ranks hold.
        keep_outputs: a training step returns all outputs on every rank, not the loss alone.
        split: see RankStages.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        owned: Ownership,
        table: Timetable,
        tied: TiedSum,
        flags: TiedFlags,
        context: RankContext,
        keep_outputs: bool,
        warning: ScheduleWarning,
        split: bool = True,
    ) -> None:
        # the model holds this object
        self._model = weakref.ref(model)
        self.table = table
        self.context, self.keep_outputs, self.warning, self.flags = context, keep_outputs, warning, flags
        self.preparation = Preparation(skeleton, owned, table, context, split)
        self.stage_ranks = StageRanks(self.preparation.mesh)
        self.sinks = Sinks(model, context.plain)
        self.left = LeftTensors()
        self.end = StepEnd(context, table, tied, [self.sinks.forget, self.preparation.forget])
        self.rank = self.end.rank
        self.steps = StepExecution(
            model, owned, table, context, self.preparation, self.sinks, self.left, self.rank
        )
        self.texts = BatchTexts()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copied_stages()

    def claim_hooks(self, before: Mapping[nn.Module, frozenset[int]]) -> None:
        """Count the forward hooks that modules have now and did not have `before` as meshwright's own."""
        self.preparation.settings = Settings(self.model, before)

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last step."""
        return self.steps.last

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
        refuse_traced_call()
        if functorch_active():
            raise UnsupportedError(
                "a functorch transform (torch.func, vmap) calls a pipelined model, whose stages run on other ranks; call the model "
                "with the rows of all examples in one batch, or plan without pp"
            )
        whole = whole_model_of(self.model)
        if whole is not None:
            # if a step of an optimizer has raised
            whole.end_step()
            # a value of one stage, such as the mean of a parameter
            args, kwargs = whole.on_every_rank((args, kwargs))
        with (
            own_stages(self.model),
            without_inference_mode(),
            random_kept_on_error(self.context.device),
            forwards_of_one_step(),
        ):
            return on_one_device(self._step, args, kwargs)

    def _step(self, args: Any, kwargs: Any) -> Any:
        try:
            self.left.show()
            self.flags.agree(self.model)
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
            refused = UsageError(refusal or "another rank of this stage cannot begin")
            self._stand_by(refused, report=bool(refusal))
        return self.finish(self.steps.run(plan))

    def _stand_by(self, error: Exception, report: bool = True) -> None:
        """Only exchange messages in this step, since this rank cannot begin. `report`: tell the other ranks about `error`; False
        where a rank of the stage does.

        Raises StageError: the first failure, on whichever rank.
        """
        failure = Failure(self.table.ranks[self.rank][0], error)
        if isinstance(error, RankLost):
            failure = self.end.failure_of(error)
        outcome = StepRun(self.preparation.rank_stages({}), [], None, failure=failure).run()
        self.preparation.forget()
        self.end.agree(outcome.failure if report else None)

    # ---- prepare
    def prepare(self, batch: Call) -> StepPlan:
        """Split a batch into microbatches, and decide how its loss is computed."""
        text, compared = self.texts.describe(*batch)
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
        full = padded(batch, count) if inputs is None else batch
        calls = microbatches(*full, count) if inputs is None else inputs.calls
        prepared = self.preparation.prepared(self.model, calls[0], batch, full, training)
        if compared and prepared.profile.draws:
            text = with_random_state(text, self.context.device)
        has_loss = loss_of(prepared.profile.output) is not None
        returns: Literal["loss", "all"] = "loss" if training and has_loss and not self.keep_outputs else "all"
        plan = StepPlan(calls, batch, text, prepared, training, "full_batch", returns, inputs=inputs)
        if training:
            ragged = full is not batch and loss_of(prepared.profile.output) is not None
            additivity = loss_additivity.ROWS_LEFT if ragged else self.preparation.additivity(prepared, batch)
            if isinstance(additivity, loss_additivity.Reason):
                reason = additivity
            elif inputs is not None:
                reason = loss_additivity.INPUT_GRADIENT
            elif self.keep_outputs and not additivity.whole:
                reason = loss_additivity.OUTPUTS_UNPROVEN
            else:
                leaves, weight = additivity.leaves, additivity.loss.weight(count)
                numbers = self.preparation.denominators(prepared, additivity, calls)
                plan = replace(plan, weight=weight, leaves=leaves, numbers=numbers)
                return replace(plan, loss_mode="per_microbatch")
            self.warning.warn(reason)
        self.preparation.tail(self.model, prepared, batch, full)
        return plan

    # ---- finish
    def finish(self, step: StepResult) -> Any:
        """Agree with all ranks on the step, share its results, and return what the caller gets.

        Raises:
            StageError: a rank failed; on every rank.
            UnsupportedError: the model returned something else than in the profile; on every rank.
        """
        plan, per_microbatch = step.plan, step.plan.loss_mode == "per_microbatch"
        loss = self.end.agree(step.failure, step.loss, plan.batch)
        state = plan.prepared.profile.kept
        written = [x if x is None else x.to(self.context.device) for x in state.held(self.model)]
        returned = loss_of(plan.output) if plan.returns == "loss" else plan.output
        expected = [] if per_microbatch and plan.returns == "loss" else pytree.tree_leaves(returned)
        sinks = self.sinks.trainable() if plan.training else {}
        gradients, values, differentiable = self.end.share(
            sinks if per_microbatch else None, None, [*written, *expected], [*written, *step.outputs]
        )
        self._write_state(state, values[: len(written)])
        self.left.hide(self.model, self.context.device)
        leaves, differentiable = values[len(written) :], differentiable[len(written) :]
        if not plan.training:
            return _like(plan.output, map(self._shown, leaves))
        if per_microbatch:
            backward = functools.partial(_scaled, gradients)
            targets = [sink.leaf for sink in sinks.values()]
            (loss,) = map(
                self._shown, connected([loss], [loss.requires_grad], targets, backward, self._after_backward)
            )
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
            failure = self.steps.run_backward(step, places, gradients).failure
            return self.end.share(sinks, plan.inputs, failure=failure, agree=True)[0]

        targets = [*(sink.leaf for sink in sinks.values()), *(plan.inputs.given if plan.inputs else ())]
        given, flags = [leaves[i] for i in places], [differentiable[i] for i in places]
        outputs = list(leaves)
        for place, result in zip(
            places, connected(given, flags, targets, backward, self._after_backward), strict=True
        ):
            outputs[place] = self._shown(result)
        return outputs

    def _write_state(self, state: WrittenState, values: list[Any]) -> None:
        """Write the buffers and numbers outside of units as the last stage has them."""
        if state and not self.steps.has_last_stage:
            state.put(self.model, values)

    def _after_backward(self) -> None:
        whole = whole_model_of(self.model)
        if whole is not None:
            whole.gradients_changed()
        self.end.equalize_later(self.model)

    def _shown(self, value: Any) -> Any:
        """A result as the caller sees it: replicated over the mesh of the stage, where there is one."""
        mesh = self.context.mesh
        if mesh is None or not isinstance(value, Tensor):
            return value
        return distribute(value, mesh, ["I"] * mesh.ndim)


def _scaled(gradients: list[Tensor | None], of_loss: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a step, scaled in place by the gradient of its loss."""
    (scale,) = of_loss
    if scale is not None and on_host(scale.device) and scale.item() == 1:
        # of loss.backward(); elsewhere reading it would wait for the device
        return gradients
    return [None if g is None or scale is None else g.mul_(scale.to(g.dtype)) for g in gradients]


def _like(tree: Any, leaves: Iterable[Any]) -> Any:
    """A tree of the same structure with other leaves."""
    return pytree.tree_unflatten(list(leaves), pytree.tree_flatten(tree)[1])
