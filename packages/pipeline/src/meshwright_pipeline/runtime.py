"""Runs one step of a schedule on this rank: forwards, backwards, and the messages between them.

A rank whose stage fails computes no more, but goes through the rest of its actions as far as messages go, so that its
neighbours, and theirs, come to the end of the step. There all ranks learn what happened.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.global_tensor import GlobalTensor
from meshwright_pipeline.actions import Action, Schedule, Shape, Timetable
from meshwright_pipeline.batching import Call
from meshwright_pipeline.counting import Weighted
from meshwright_pipeline.interception import Label
from meshwright_pipeline.splitting import Halves
from meshwright_pipeline.stage import Stage
from meshwright_pipeline.transport import Arriving, Broken, Crossing, Transport, Wire

Tensor = torch.Tensor
_AHEAD = 4
"""Actions that are looked at for the next message to receive."""
_ROOM = 1024
"""Tags of one message: how many tensors may cross a cut together."""


@dataclass(frozen=True)
class Failure:
    """What went wrong: the action, and the error; `lost`: it is another rank's, of which nothing came, that of the stage."""

    action: Action
    error: Exception
    lost: bool = False


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
        results: microbatch -> result of the model, on the rank of the last stage.
        failure: what went wrong here first.
        spans: what ran when.
        most_alive: the largest number of microbatches, over all stages of the rank, that were held at once.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failure: Failure | None = None
    spans: list[Span] = field(default_factory=list)
    most_alive: int = 0


class Runtime:
    """The stages of one rank for batches of one signature.

    Args:
        stages: index -> stage, those that this rank holds.
        shape: ranks, stages and microbatches.
        schedule, table: say who holds which stage, and what every rank does in which order.
        transport: messages along the axis.
        mesh: the mesh of a stage, None where values are ordinary tensors.
        split: whether the two halves of a split backward are run apart; else the first does all.
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
        self.wires: dict[int, Wire] = {}  # cut -> how values lie, once that has been said
        self.announced: set[int] = set()  # cuts of which the rank behind has been told

    def run(
        self,
        actions: Sequence[Action],
        calls: Sequence[Call],
        seed: Callable[[int, Any], Tensor] | None,
        divisors: Sequence[float] = (),
    ) -> Step:
        """Run `actions` on the microbatches `calls`.

        Args:
            seed: (microbatch, result of the model) -> the number whose gradient is taken, its weight included; None runs
                forwards only.
        """
        step = _Running(self, calls, seed, divisors)
        with contextlib.nullcontext() if seed is not None else torch.no_grad():
            for place, action in enumerate(actions):
                step.do(action, actions[place + 1 : place + 1 + _AHEAD])
        step.settle()
        return step.step

    def peer(self, stage: int) -> int | None:
        """The other rank that holds a stage, None where it is this one."""
        owner = self.schedule.owner(stage, self.shape)
        return None if owner == self.transport.rank else owner

    def tag(self, cut: int, microbatch: int, backward: bool) -> int:
        """A tag of its own for every message of a step."""
        return ((cut * self.shape.microbatches + microbatch) * 2 + backward) * _ROOM


class _Running:
    """One step while it runs."""

    def __init__(
        self,
        runtime: Runtime,
        calls: Sequence[Call],
        seed: Callable[[int, Any], Tensor] | None,
        divisors: Sequence[float],
    ) -> None:
        self.runtime, self.calls, self.seed, self.divisors = runtime, calls, seed, divisors
        self.step = Step()
        self.held: dict[tuple[int, int], _Held] = {}
        # (cut, microbatch, backward) -> what comes from another rank, or lies here for a stage of this rank
        self.arriving: dict[tuple[int, int, bool], Arriving] = {}
        self.local: dict[tuple[int, int, bool], list[Tensor]] = {}
        self.broken: set[int] = set()
        self.gone: set[int] = set()  # ranks
        self.began = time.perf_counter()

    def do(self, action: Action, following: Sequence[Action]) -> None:
        """Run one action; what the next of those that follow waits for is on its way meanwhile."""
        start = time.perf_counter()
        given = self._arrive(action)
        ready = time.perf_counter()
        for coming in following:
            try:
                if self._prepare(coming):
                    break
            except RuntimeError as error:
                self._lose(self._beside(coming, ahead=False), error)
                break
        made: list[Tensor] | None = None
        if given is not None and self.step.failure is None:
            try:
                made = self._compute(action, given)
            except (
                Exception
            ) as error:  # whatever a stage raises, its neighbours must come to the end of the step
                self._fail(Failure(action, error))
        try:
            self._pass_on(action, made)
        except RuntimeError as error:
            self._lose(self._beside(action, ahead=True), error)
        end = time.perf_counter()
        self.step.spans.append(Span(action, ready - self.began, end - self.began, ready - start))

    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        lost = self.runtime.transport.settle(self.gone)
        if lost is not None:
            sent, error = lost
            self._lose(self.runtime.table.ranks[sent.peer][sent.place], error)

    def _arrive(self, action: Action) -> list[Tensor] | None:
        """What an action needs; None where it will not come."""
        try:
            return self._given(action)
        except Broken:
            return None
        except RuntimeError as error:
            source = self._source(action)
            assert source is not None
            if source[0] not in self.runtime.wires:
                self.broken.add(source[0])
            self._lose(self._beside(action, ahead=False), error)
            return None

    def _beside(self, action: Action, ahead: bool) -> Action:
        """What the stage beside does with what an action makes (`ahead`), or made for it."""
        if action.kind == "F":
            return Action("F", action.stage + (1 if ahead else -1), action.microbatch)
        stage = action.stage + (-1 if ahead else 1)
        whole = Action("B", stage, action.microbatch)
        return whole if whole in self.runtime.places else Action("I", stage, action.microbatch)

    def _fail(self, failure: Failure) -> None:
        if self.step.failure is None:
            self.step.failure = failure
            self.held.clear()

    def _lose(self, missing: Action, error: RuntimeError) -> None:
        """A message did not come or go: the rank at its other end is gone. Nothing more is said to it."""
        peer = self.runtime.peer(missing.stage)
        if peer is None:
            raise error
        self.gone.add(peer)
        text = f"it has died or hangs, since a message to or from it was lost ({str(error).splitlines()[0]})"
        self._fail(Failure(missing, ConnectionError(text), lost=True))

    # ---- messages
    def _source(self, action: Action) -> tuple[int, int] | None:
        """(cut, stage) that an action's input comes over and from; None where it needs none."""
        if action.kind == "W":
            return None
        if action.kind == "F":
            return (action.stage - 1, action.stage - 1) if action.stage else None
        return (action.stage, action.stage + 1) if action.stage + 1 < self.runtime.shape.stages else None

    def _prepare(self, action: Action) -> bool:
        """Start to receive what an action needs, as far as it is known how that lies; whether it needs anything."""
        source = self._source(action)
        if source is None or self.runtime.peer(source[1]) is None:
            return False
        cut, stage = source
        key, peer = (cut, action.microbatch, action.kind != "F"), self.runtime.peer(stage)
        wire = self._wire(cut, action.kind != "F")
        if peer is None or wire is None or key in self.arriving or cut in self.broken or peer in self.gone:
            return True
        tag = self.runtime.tag(*key)
        self.arriving[key] = self.runtime.transport.receive(wire, peer, tag)
        return True

    def _wire(self, cut: int, backward: bool) -> Wire | None:
        wire = self.runtime.wires.get(cut)
        if wire is None or not backward:
            return wire
        return tuple(one for one in wire if one.differentiable)

    def _given(self, action: Action) -> list[Tensor]:
        """The local tensors that an action needs from the stage beside it."""
        source = self._source(action)
        if source is None:
            return []
        cut, stage = source
        key, peer = (cut, action.microbatch, action.kind != "F"), self.runtime.peer(stage)
        if cut in self.broken or peer in self.gone:
            raise Broken
        if peer is None:
            found = self.local.pop(key, None)
            if found is None:
                raise Broken
            return found
        if cut not in self.runtime.wires and action.kind == "F":
            try:
                self.runtime.wires[cut] = self.runtime.transport.hear(peer, cut)
            except Broken:
                self.broken.add(cut)
                raise
        self._prepare(action)
        arrived = self.arriving.pop(key).wait()
        self.runtime.transport.taken(peer, self.runtime.places[self._beside(action, ahead=False)])
        return arrived

    def _pass_on(self, action: Action, made: list[Tensor] | None) -> None:
        """Send what an action has made; None: it has failed, and messages are only kept in step."""
        if action.kind == "W":
            return
        backward = action.kind != "F"
        cut = action.stage - 1 if backward else action.stage
        if not 0 <= cut < self.runtime.shape.stages - 1 or cut in self.broken:
            return
        target = action.stage - 1 if backward else action.stage + 1
        peer, key = self.runtime.peer(target), (cut, action.microbatch, backward)
        if peer is None:
            if made is not None:
                self.local[key] = made
            elif cut not in self.runtime.wires:
                self.broken.add(cut)
            return
        if peer in self.gone:
            return
        transport, announced = self.runtime.transport, self.runtime.announced
        place = self.runtime.places[self._beside(action, ahead=True)]
        if not backward and cut not in announced:
            if made is None:
                self.broken.add(cut)
                transport.announce(None, peer, cut, place)
                return
            announced.add(cut)
            transport.announce(self.runtime.wires[cut], peer, cut, place)
        if made is None:
            wire = self._wire(cut, backward)
            assert wire is not None
            made = [one.empty(transport.device) for one in wire]
        transport.send(made, peer, self.runtime.tag(*key), "backward" if backward else "forward", place)

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
            wire = runtime.wires[action.stage - 1]
            for label, one, local in zip(stage.cut.received(action.stage), wire, given, strict=True):
                leaf = local.detach()
                if one.differentiable and self.seed is not None:
                    inputs.append(leaf.requires_grad_())
                received[label] = one.value(_arrived(leaf) if leaf.requires_grad else leaf, runtime.mesh)
        with Weighted(self.divisors) if self.divisors and stage.is_last else contextlib.nullcontext():
            values, result = stage.run(*self.calls[action.microbatch], received, action.microbatch)
        outputs: list[Tensor] = []
        made: list[Tensor] = []
        if stage.is_last:
            if self.seed is None:
                self.step.results[action.microbatch] = result
            else:
                outputs.append(self.seed(action.microbatch, result))
        else:
            sent = [values[label] for label in stage.cut.sent(action.stage)]
            self._check_wire(action.stage, tuple(Crossing.of(value) for value in sent))
            made = [value.to_local() if isinstance(value, GlobalTensor) else value for value in sent]
            outputs = [local for local in made if local.requires_grad]
        if self.seed is not None:
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
        last = action.stage == self.runtime.shape.stages - 1
        gradients = None if last else [_shaped(g, o) for g, o in zip(given, held.outputs, strict=True)]
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


class _Arrived(torch.autograd.Function):
    """Identity behind a leaf, which a model may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data  # a detached one would count as a view of the leaf

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _arrived(leaf: Tensor) -> Tensor:
    value: Tensor = _Arrived.apply(leaf)
    return value


def _shaped(gradient: Tensor, output: Tensor) -> Tensor:
    return gradient if gradient.shape == output.shape else gradient.view(output.shape)


def _shown(wire: Wire) -> str:
    return ", ".join(f"{list(one.local_shape)} {one.dtype}" for one in wire)
