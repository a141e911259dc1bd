"""Runs the actions of a step on this rank, and on the last stage what follows from them: the loss, or the code after the last unit.

Around them are the gradients and the random numbers of one device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.schedule.schedule import Action
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.stages.whole_model import own_stages
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline.analysis import loss_additivity
from meshwright_pipeline.partition.units import Ownership
from meshwright_pipeline.pytrees import full_value, leaves_of
from meshwright_pipeline.runtime.actions.executor import StepOutcome, StepRun
from meshwright_pipeline.runtime.actions.full_batch_tail import tail_backward
from meshwright_pipeline.runtime.agreement import RankContext
from meshwright_pipeline.runtime.grad_handover import Sinks
from meshwright_pipeline.runtime.p2p.step import Failure, StepMessages
from meshwright_pipeline.runtime.prepare import Preparation
from meshwright_pipeline.runtime.results.hooked_activations import HookedActivations
from meshwright_pipeline.runtime.results.left_tensors import LeftTensors
from meshwright_pipeline.runtime.step_plan import StepPlan, StepResult
from meshwright_pipeline.trace.loss import check_loss_path, need_loss
from meshwright_pipeline.trace.rng_replay import RngReplay, StepDraws

Tensor = torch.Tensor


class StepExecution:
    """Runs the steps of a model on one rank.

    Args:
        rank: of the axis.
        sinks: where the gradients of a step are accumulated. `left`: what steps leave in attributes.

    Attributes:
        last: the outcome of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        owned: Ownership,
        table: Timetable,
        context: RankContext,
        preparation: Preparation,
        sinks: Sinks,
        left: LeftTensors,
        rank: int,
    ) -> None:
        # the model holds this object
        self._model = weakref.ref(model)
        self.owned, self.table, self.context, self.preparation = owned, table, context, preparation
        self.sinks, self.left, self.rank = sinks, left, rank
        self.hooked = HookedActivations()
        self.last: StepOutcome | None = None

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self.table.owner(self.table.shape.stages - 1) == self.rank

    def run(self, plan: StepPlan) -> StepResult:
        """Run the actions of this rank; in "full_batch", the forwards, and the code after the last unit."""
        losses: dict[int, Tensor] = {}
        results: dict[int, Any] = {}

        def start_backward(microbatch: int, result: Any) -> list[Tensor]:
            loss = need_loss(result)
            if microbatch == 0 and len(plan.calls) > 1:
                check_loss_path(plan.prepared.loss_paths, self._trained(messages()), loss)
            weighted: Tensor = _summable(loss) * plan.weight
            losses[microbatch] = weighted.detach().requires_grad_(weighted.requires_grad)
            if plan.returns == "all":
                results[microbatch] = result
            # the sum over ranks has the gradient 1 for each part
            return [weighted.to_local() if isinstance(weighted, GlobalTensor) else weighted]

        per_microbatch = plan.loss_mode == "per_microbatch"
        start = start_backward if per_microbatch else None
        run = StepRun(plan.prepared.stages, plan.calls, start, plan.numbers, plan.batch)
        # the run holds the function that starts its backwards
        messages = weakref.ref(run.messages)
        step, state = StepResult(plan, run), plan.prepared.profile.kept
        self.left.watch(self.model, plan.prepared.profile.left_anywhere)
        before = [] if per_microbatch else [x if x is None else x.clone() for x in state.held(self.model)]
        gradients = self._gradients() if plan.training else contextlib.nullcontext()
        random_numbers = self._random_numbers(plan.prepared.streams)
        with self.preparation.calls.replaced(self.model), gradients, random_numbers as step.drawn:
            self.last = outcome = run.run()
            if self.has_last_stage and outcome.failure is None and not run.input_missing:
                try:
                    if per_microbatch:
                        if plan.numbers is not None:
                            plan.numbers.check()
                        self._add_up(step, losses, results)
                    else:
                        # the tail writes again what the forwards wrote
                        state.put(self.model, before)
                        self._run_tail(step, outcome)
                except Exception as error:
                    # of any kind: the other ranks must come to the end of the step
                    outcome.failure = Failure(self._last_stage_action("F"), error)
        outcome.unit_outputs.clear()
        step.failure = outcome.failure
        return step

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """Inside, the step computes gradients."""
        settings = self.preparation.settings
        assert settings is not None
        with self.sinks.active(), self.hooked.step(self.model, settings.own_hooks):
            yield

    def _add_up(self, step: StepResult, losses: Mapping[int, Tensor], results: Mapping[int, Any]) -> None:
        """The loss and the outputs of the batch, from those of microbatches."""
        total = functools.reduce(torch.add, [losses[m].detach() for m in sorted(losses)])
        part = _own_part(total, self.context.reports_loss)
        step.loss = part.requires_grad_(any(loss.requires_grad for loss in losses.values()))
        if step.plan.returns == "all":
            parts = [leaves_of(results[m]) for m in sorted(results)]
            step.outputs = loss_additivity.join_leaves(step.plan.leaves, parts)

    def _run_tail(self, step: StepResult, outcome: StepOutcome) -> None:
        """Run the code after the last unit on the whole batch."""
        plan = step.plan
        # made when the step was prepared
        tail = self.preparation.tail(self.model, plan.prepared, plan.whole, plan.whole)
        step.tail, result = tail.run(plan.whole, outcome)
        returned = need_loss(result) if plan.returns == "loss" else result
        step.outputs = [full_value(leaf) for leaf in leaves_of(returned)]

    def _trained(self, messages: StepMessages | None) -> list[bool]:
        """Which values that the last stage received, and which of its parameters, require a gradient."""
        assert messages is not None
        specs = messages.specs.get(self.table.shape.stages - 2, ())
        return [*(x.differentiable for x in specs), *self.sinks.flags()]

    def _random_numbers(
        self, streams: RngReplay | None, drawn: StepDraws | None = None
    ) -> contextlib.AbstractContextManager[StepDraws | None]:
        """Inside, random numbers are those of one device: of a new step, or of the backwards of the step `drawn`."""
        if streams is None:
            return contextlib.nullcontext()
        stages = self.table.schedule.own(self.rank, self.table.shape)
        return streams.step({unit for stage in stages for unit in self.owned.stages[stage]}, drawn)

    def _last_stage_action(self, kinds: str) -> Action:
        """The first action of these kinds on the last stage, which this rank holds."""
        last = self.table.shape.stages - 1
        return next(a for a in self.table.ranks[self.rank] if a.stage == last and a.kind in kinds)

    def run_backward(
        self, step: StepResult, places: Sequence[int], gradients: Sequence[Tensor | None]
    ) -> StepOutcome:
        """Run the backwards of a step in "full_batch", from the gradients of its outputs at `places`."""
        with (
            # what is recomputed reads attributes too
            self.left.shown(self.model, self.context.device),
            own_stages(self.model),
            self._gradients(),
            self._random_numbers(step.plan.prepared.streams, step.drawn),
        ):
            unit_gradients: Mapping[int, Sequence[Tensor | None]] = {}
            if step.tail is not None:
                try:
                    results = [step.outputs[i] for i in places]
                    unit_gradients = tail_backward(step.tail, results, gradients)
                except Exception as error:
                    # of any kind: the other ranks must come to the end of the step
                    step.run.fail(Failure(self._last_stage_action("BI"), error))
            self.last = step.run.run_backward(unit_gradients)
        return self.last


def _summable(loss: Tensor) -> Tensor:
    """A loss that is a sum of parts of ranks, or that all ranks have, as it is; others as an ordinary tensor.

    So ranks need not wait for one another in every microbatch.
    """
    if isinstance(loss, GlobalTensor) and set(loss.global_layout.states) <= {"P", "I"}:
        return loss
    return full_value(loss)  # type: ignore[no-any-return]


def _own_part(loss: Tensor, reports_loss: bool) -> Tensor:
    """What this rank adds to the loss of all ranks: zero where another rank has the same part."""
    part, adds = loss, reports_loss
    if isinstance(loss, GlobalTensor):
        layout = loss.global_layout
        part = loss.to_local()
        adds = all(s == "P" or at == 0 for s, at in zip(layout.states, layout.context.coords, strict=True))
    return part.detach().clone() if adds else torch.zeros_like(part)
