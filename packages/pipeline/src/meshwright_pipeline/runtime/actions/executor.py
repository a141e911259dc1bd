"""Runs the actions of one step on this rank: forwards, backwards and the messages between them.

A rank whose stage fails computes no more, but still sends and receives what the other ranks wait for. So every
rank comes to the end of the step, where all learn about the failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.schedule.schedule import Action
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import apply_own
from meshwright_pipeline.runtime.actions.split_backward import SplitBackward
from meshwright_pipeline.runtime.actions.stage import Stage
from meshwright_pipeline.runtime.p2p.messages import Specs, TensorSpec
from meshwright_pipeline.runtime.p2p.step import Failure, Peers, StepMessages, Tensors
from meshwright_pipeline.trace.loss_denominators import BatchDenominatorMode, Denominators
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Label

Tensor = torch.Tensor
StartBackward = Callable[[int, Any], list[Tensor]]
"""(microbatch, result of the model) -> the tensors that its backward pass starts from; each requires a gradient."""
_PREFETCH = 4
"""Following actions among which the next message to receive is looked for."""


@dataclass(frozen=True)
class Span:
    """When an action ran on this rank: seconds since the step began; `waited` for messages before it."""

    action: Action
    start: float
    end: float
    waited: float


@dataclass
class _Saved:
    """Local tensors that a microbatch keeps on a stage from its forward to its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    split: SplitBackward | None = None


@dataclass
class StepOutcome:
    """The outcome of a step on this rank.

    Attributes:
        unit_outputs: microbatch -> this rank's parts of the unit outputs that the code after the last unit takes; on
            the rank of the last stage, where forwards end there. `specs`: their descriptions.
        failure: the first error on this rank. `spans`: when each action ran.
        most_alive: the largest number of microbatches, over all stages of the rank, that were saved at once.
    """

    unit_outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    specs: Specs = ()
    failure: Failure | None = None
    spans: list[Span] = field(default_factory=list)
    most_alive: int = 0


@dataclass(frozen=True)
class RankStages:
    """The stages of one rank, for batches of one signature; none on a rank that only exchanges messages.

    Args:
        peers: the other ends of their cuts.
        mesh: the mesh of a stage; None where values are ordinary tensors.
        split: run the two halves of a split backward separately; else the first half does all.
    """

    stages: Mapping[int, Stage]
    peers: Peers
    mesh: DeviceMesh | None
    split: bool = True


class StepRun:
    """One step while it runs.

    Args:
        start_backward: where backward passes start. None: forwards end after the last unit, and backwards run later
            (`run_backward`), from gradients of the unit outputs.
        numbers: loss denominators of the whole batch.
        batch: what this rank was given, in words.
        failure: an error before the step: nothing is computed, and only messages are exchanged.
    """

    def __init__(
        self,
        stages: RankStages,
        calls: Sequence[Call],
        start_backward: StartBackward | None,
        numbers: Denominators | None = None,
        batch: str | None = None,
        failure: Failure | None = None,
    ) -> None:
        self.stages, self.calls, self.start_backward, self.numbers = stages, calls, start_backward, numbers
        self.outcome = StepOutcome(failure=failure)
        self.saved: dict[tuple[int, int], _Saved] = {}
        # not a bound method: a reference cycle would keep activations until the garbage collector runs
        self.fail = partial(_fail, self.outcome, self.saved)
        self.messages = StepMessages(stages.peers, batch, start_backward is not None, self.fail)
        self.gradients: dict[int, Sequence[Tensor | None]] | None = None
        # inputs of an action did not come, since another rank has failed
        self.input_missing = False
        self.began = time.perf_counter()

    def run(self) -> StepOutcome:
        """Run the actions, or the forwards alone where backwards run later.

        A rank that has failed also runs the backwards whose gradients other ranks wait for.
        """

        def wanted(action: Action) -> bool:
            late = self.outcome.failure is not None and self.messages.awaited(action)
            return action.kind == "F" or self.start_backward is not None or late

        self._run(wanted)
        return self.outcome

    def run_backward(self, gradients: Mapping[int, Sequence[Tensor | None]]) -> StepOutcome:
        """Run the backwards of a step, after its forwards. `gradients`: microbatch -> those of the last stage's unit outputs."""
        self.gradients = dict(gradients)
        self.messages.begin_backward()
        self._run(lambda action: action.kind != "F")
        return self.outcome

    def _run(self, wanted: Callable[[Action], bool]) -> None:
        actions = self.stages.peers.actions
        for place, action in enumerate(actions):
            if wanted(action):
                following = actions[place + 1 : place + 1 + _PREFETCH]
                self._run_action(action, filter(wanted, following))
        self.messages.flush()

    def _run_action(self, action: Action, following: Iterable[Action]) -> None:
        """Run one action; inputs of those that follow are received meanwhile."""
        start = time.perf_counter()
        inputs = self.messages.inputs_of(action)
        ready = time.perf_counter()
        self.messages.prefetch(following)
        outputs: Tensors | None = None
        self.input_missing = self.input_missing or inputs is None
        if inputs is not None and not self.input_missing and self.outcome.failure is None:
            try:
                if action.kind == "F":
                    outputs = [*self._forward(action, inputs)]
                elif action.kind == "W":
                    split = self.saved.pop((action.stage, action.microbatch)).split
                    if split is not None:
                        split.weight_gradients()
                    outputs = []
                else:
                    outputs = self._backward(action, inputs)
            except Exception as error:
                # of any kind: the other ranks must come to the end of the step
                self.fail(Failure(action, error))
        self.messages.send_outputs(action, outputs)
        end = time.perf_counter()
        self.outcome.spans.append(Span(action, ready - self.began, end - self.began, ready - start))

    # ---- compute
    def _forward(self, action: Action, received: Tensors) -> list[Tensor]:
        stage, index, microbatch = self.stages.stages[action.stage], action.stage, action.microbatch
        values, leaves = self._inputs(stage, received)
        stop = self.start_backward is None and stage.is_last
        glue = BatchDenominatorMode(self.numbers) if self.numbers is not None and stage.is_last else None
        results, result = stage.run(self.calls[microbatch], values, microbatch, stop, glue)
        outputs: list[Tensor] = []
        if stage.is_last and self.start_backward is not None:
            starts = self.start_backward(microbatch, result)
        else:
            sent = [results[label] for label in (stage.cut.final if stop else stage.cut.sent(index))]
            specs = tuple(TensorSpec.of(value) for value in sent)
            before = self.messages.sent_specs.setdefault(index, specs)
            if before != specs:
                change = f"from {_shown(before)} to {_shown(specs)}"
                raise UnsupportedError(
                    f"the tensors that cross the cut after stage {index} have changed {change}; every microbatch of a step must "
                    "send the same"
                )
            outputs = [value.to_local() if isinstance(value, GlobalTensor) else value for value in sent]
            starts = [local for local in outputs if local.requires_grad]
        if torch.is_grad_enabled():
            self.saved[index, microbatch] = _Saved(leaves, starts)
            self.outcome.most_alive = max(self.outcome.most_alive, len(self.saved))
        detached = [local.detach() for local in outputs]
        if not stop:
            return detached
        self.outcome.unit_outputs[microbatch], self.outcome.specs = detached, specs
        return []

    def _inputs(self, stage: Stage, received: Tensors) -> tuple[dict[Label, Tensor], list[Tensor]]:
        """The values of what was received, by label, and the leaves among them that get a gradient."""
        values: dict[Label, Tensor] = {}
        leaves: list[Tensor] = []
        if not stage.index:
            return values, leaves
        specs = self.messages.specs[stage.index - 1]
        for label, spec, local in zip(stage.cut.received(stage.index), specs, received, strict=True):
            assert local is not None
            leaf = local.detach()
            if spec.differentiable and torch.is_grad_enabled():
                leaves.append(leaf.requires_grad_())
            values[label] = spec.value(writable(leaf) if leaf.requires_grad else leaf, self.stages.mesh)
        return values, leaves

    def _backward(self, action: Action, received: Tensors) -> Tensors:
        key = (action.stage, action.microbatch)
        saved = self.saved.pop(key) if action.kind == "B" else self.saved[key]
        last = action.stage == self.stages.peers.shape.stages - 1
        given: Sequence[Tensor | None] | None = None if last else received
        if last and self.gradients is not None:
            # popped, so that a gradient is freed as soon as it has been used
            given = self.gradients.pop(action.microbatch)
        gradients = None
        if given is not None:
            pairs = list(zip(saved.outputs, given, strict=True))
            saved.outputs = [output for output, gradient in pairs if gradient is not None]
            gradients = [gradient.view(output.shape) for output, gradient in pairs if gradient is not None]
        # a loss may have no gradient
        if saved.outputs and saved.outputs[0].requires_grad:
            if action.kind == "I" and self.stages.split:
                saved.split = SplitBackward(saved.outputs, saved.inputs)
                saved.split.input_gradients(gradients)
            else:
                torch.autograd.backward(saved.outputs, gradients)
        return [leaf.grad for leaf in saved.inputs]


def _fail(outcome: StepOutcome, saved: dict[tuple[int, int], _Saved], failure: Failure) -> None:
    """Record the first failure, and compute no more."""
    if outcome.failure is None:
        outcome.failure = failure
        saved.clear()


class _Writable(torch.autograd.Function):
    """Identity after a leaf, whose result a model may write to in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        # a detached tensor would count as a view of the leaf
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def writable(leaf: Tensor) -> Tensor:
    """The value of `leaf`, for a model that may write to it in place."""
    value: Tensor = apply_own(_Writable, leaf)
    return value


def _shown(specs: Specs) -> str:
    frozen = {True: "", False: " without gradient"}
    return ", ".join(f"{list(spec.local_shape)} {spec.dtype}{frozen[spec.differentiable]}" for spec in specs)
