"""Runs one step of a schedule on this rank: forwards and backwards, and between them the post.

A rank whose stage fails computes no more, but goes through the rest of its actions as far as messages go, so that its
neighbours, and theirs, come to the end of the step. There all ranks learn what happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline.runtime.p2p import Crossing, Transport, Wire
from meshwright_pipeline.runtime.p2p_step import Failure, Letter, Mail
from meshwright_pipeline.runtime.split_backward import Halves
from meshwright_pipeline.runtime.stage import Stage
from meshwright_pipeline.trace.loss_denominators import BatchDenominatorMode, Denominators
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Label

Tensor = torch.Tensor
Ends = Callable[[int, Any], list[Tensor]]
"""(microbatch, result of the model) -> the tensors that its backward pass starts from; each requires a gradient."""
_AHEAD = 4
"""Actions that are looked at for the next message to receive."""


@dataclass(frozen=True)
class Span:
    """When an action ran on this rank: seconds since the step began; `waited` for messages before it."""

    action: Action
    start: float
    end: float
    waited: float


@dataclass
class _Held:
    """What a microbatch holds on a stage between its forward and its backward: local tensors that autograd starts from."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    halves: Halves | None = None


@dataclass
class Step:
    """What came of a step on this rank.

    Attributes:
        behind: microbatch -> this rank's parts of what code behind the last unit takes, on a rank of the last stage where
            forwards end there. `wire`: how they lie.
        failure: what went wrong here first.
        spans: what ran when.
        most_alive: the largest number of microbatches, over all stages of the rank, that were held at once.
    """

    behind: dict[int, list[Tensor]] = field(default_factory=dict)
    wire: Wire = ()
    failure: Failure | None = None
    spans: list[Span] = field(default_factory=list)
    most_alive: int = 0


class Runtime:
    """The stages of one rank for batches of one signature.

    Args:
        stages: index -> stage, those that this rank holds; none on a rank that only keeps messages in step.
        shape: ranks, stages and microbatches.
        schedule, table: say who holds which stage, and what every rank does in which order.
        transport: messages along the axis.
        mesh: the mesh of a stage, None where values are ordinary tensors.
        split: whether the two halves of a split backward are run apart; else the first does all.

    Attributes:
        wires: cut -> how what this rank sends over it lies, once it has been sent.
        letters, heard: what was written, and read and understood, in steps before.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        shape: Shape,
        schedule: Schedule,
        table: Timetable,
        transport: Transport,
        mesh: DeviceMesh | None,
        split: bool = True,
    ) -> None:
        self.split = split
        self.stages, self.shape, self.schedule = stages, shape, schedule
        self.transport, self.mesh, self.table = transport, mesh, table
        self.places = {action: place for own in table.ranks for place, action in enumerate(own)}
        self.wires: dict[int, Wire] = {}
        self.letters: dict[tuple[int, bool], bytes] = {}
        self.heard: dict[int, tuple[bytes, Letter]] = {}

    def peer(self, stage: int) -> int | None:
        """The other rank that holds a stage, None where it is this one."""
        owner = self.schedule.owner(stage, self.shape)
        return None if owner == self.transport.rank else owner


class Running:
    """One step while it runs.

    Args:
        runtime: the stages.
        calls: the microbatches.
        ends: where backward passes start; None: at what code behind the last unit takes, where forwards then end.
        numbers: of the whole batch, see counting.
        batch: what this rank was given, in words.
        backward: whether backward passes follow at once.
        failure: what has gone wrong already: nothing is computed, and messages are kept in step.
    """

    def __init__(
        self,
        runtime: Runtime,
        calls: Sequence[Call],
        ends: Ends | None,
        numbers: Denominators | None = None,
        batch: str | None = None,
        backward: bool = True,
        failure: Failure | None = None,
    ) -> None:
        self.runtime, self.calls, self.ends, self.numbers = runtime, calls, ends, numbers
        self.step = Step(failure=failure)
        self.held: dict[tuple[int, int], _Held] = {}
        # not a method of this: what a step holds must go when it ends, and not when cycles are looked for
        self.fail = partial(_fail, self.step, self.held)
        self.mail = Mail(runtime, batch, backward, self.fail)
        self.gradients: dict[int, Sequence[Tensor | None]] | None = None
        self.cut_off = False  # something did not come, since another rank has failed
        self.began = time.perf_counter()

    def run(self, part: Literal["all", "forward"]) -> Step:
        """Run the step, or its forwards only; a rank that fails does what others wait for in any case."""
        self._go(
            lambda action: (
                action.kind == "F"
                or part == "all"
                or (self.step.failure is not None and self.mail.awaited(action))
            )
        )
        return self.step

    def run_back(self, gradients: Mapping[int, Sequence[Tensor | None]]) -> Step:
        """Run the backward passes of a step whose forwards have been run.

        Args:
            gradients: microbatch -> gradients of what `ends` gave, on the rank of the last stage.
        """
        self.gradients = dict(gradients)
        self.mail.return_all()
        self._go(lambda action: action.kind != "F")
        return self.step

    def _go(self, wanted: Callable[[Action], bool]) -> None:
        actions = self.runtime.table.ranks[self.runtime.transport.rank]
        for place, action in enumerate(actions):
            if wanted(action):
                following = actions[place + 1 : place + 1 + _AHEAD]
                self._do(action, [coming for coming in following if wanted(coming)])
        self.mail.settle()

    def _do(self, action: Action, following: Sequence[Action]) -> None:
        """Run one action; what the next of those that follow waits for is on its way meanwhile."""
        start = time.perf_counter()
        given = self.mail.arrive(action)
        ready = time.perf_counter()
        self.mail.look_ahead(following)
        made: list[Tensor] | None = None
        self.cut_off = self.cut_off or given is None
        if given is not None and not self.cut_off and self.step.failure is None:
            try:
                made = self._compute(action, given)
            except (
                Exception
            ) as error:  # whatever a stage raises, its neighbours must come to the end of the step
                self.fail(Failure(action, error))
        self.mail.pass_on(action, made)
        end = time.perf_counter()
        self.step.spans.append(Span(action, ready - self.began, end - self.began, ready - start))

    # ---- compute
    def _compute(self, action: Action, given: list[Tensor]) -> list[Tensor]:
        if action.kind == "F":
            return self._forward(action, given)
        return self._weights(action) if action.kind == "W" else self._backward(action, given)

    def _forward(self, action: Action, given: list[Tensor]) -> list[Tensor]:
        runtime = self.runtime
        stage = runtime.stages[action.stage]
        inputs: list[Tensor] = []
        received: dict[Label, Tensor] = {}
        if action.stage:
            wire = self.mail.wires[action.stage - 1]
            for label, one, local in zip(stage.cut.received(action.stage), wire, given, strict=True):
                leaf = local.detach()
                if one.differentiable and torch.is_grad_enabled():
                    inputs.append(leaf.requires_grad_())
                received[label] = one.value(arrived(leaf) if leaf.requires_grad else leaf, runtime.mesh)
        stop = self.ends is None and stage.is_last
        glue = BatchDenominatorMode(self.numbers) if self.numbers is not None and stage.is_last else None
        values, result = stage.run(*self.calls[action.microbatch], received, action.microbatch, stop, glue)
        outputs: list[Tensor] = []
        made: list[Tensor] = []
        if stage.is_last and self.ends is not None:
            outputs = self.ends(action.microbatch, result)
        else:
            labels = stage.cut.final if stop else stage.cut.sent(action.stage)
            sent = [values[label] for label in labels]
            self._check_wire(action.stage, tuple(Crossing.of(value) for value in sent))
            made = [value.to_local() if isinstance(value, GlobalTensor) else value for value in sent]
            outputs = [local for local in made if local.requires_grad]
        if stop:
            self.step.behind[action.microbatch] = [local.detach() for local in made]
            self.step.wire, made = self.runtime.wires[action.stage], []
        if torch.is_grad_enabled():
            self.held[action.stage, action.microbatch] = _Held(inputs, outputs)
            self.step.most_alive = max(self.step.most_alive, len(self.held))
        return [local.detach() for local in made]

    def _check_wire(self, cut: int, wire: Wire) -> None:
        known = self.runtime.wires.setdefault(cut, wire)
        if known != wire:
            raise UnsupportedError(
                f"what crosses the cut behind stage {cut} has changed from {_shown(known)} to {_shown(wire)}; for every "
                "microbatch of the same shapes it must be the same"
            )

    def _backward(self, action: Action, given: list[Tensor]) -> list[Tensor]:
        key = (action.stage, action.microbatch)
        held = self.held.pop(key) if action.kind == "B" else self.held[key]
        last, gradients = action.stage == self.runtime.shape.stages - 1, None
        if not last:
            gradients = [_shaped(g, o) for g, o in zip(given, held.outputs, strict=True)]
        elif self.gradients is not None:
            # taken out: nothing keeps them longer than they are needed
            pairs = list(zip(held.outputs, self.gradients.pop(action.microbatch), strict=True))
            held.outputs = [output for output, gradient in pairs if gradient is not None]
            gradients = [gradient for _, gradient in pairs if gradient is not None]
        if held.outputs and held.outputs[0].requires_grad:  # a loss may have none
            if action.kind == "I" and self.runtime.split:
                held.halves = Halves(held.outputs, held.inputs)
                held.halves.first(gradients)
            else:
                torch.autograd.backward(held.outputs, gradients)
        return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in held.inputs]

    def _weights(self, action: Action) -> list[Tensor]:
        halves = self.held.pop((action.stage, action.microbatch)).halves
        if halves is not None:
            halves.second()
        return []


def _fail(step: Step, held: dict[tuple[int, int], _Held], failure: Failure) -> None:
    """Compute no more, since this has gone wrong."""
    if step.failure is None:
        step.failure = failure
        held.clear()


class _Arrived(torch.autograd.Function):
    """Identity behind a leaf, which a model may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data  # a detached one would count as a view of the leaf

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def arrived(leaf: Tensor) -> Tensor:
    """What `leaf` is, for a model that may change it in place."""
    value: Tensor = _Arrived.apply(leaf)
    return value


def _shaped(gradient: Tensor, output: Tensor) -> Tensor:
    return gradient if gradient.shape == output.shape else gradient.view(output.shape)


def _shown(wire: Wire) -> str:
    return ", ".join(f"{list(one.local_shape)} {one.dtype}" for one in wire)
