"""The post of one step on one rank: what its actions need of other stages, and where what they make has to go.

In every step the first message over a cut is a letter, which says how what follows lies, whether gradients come back, and what
batch its sender was given. Both ends go by the letter, whatever they expected themselves, and a rank that has failed goes on
sending what the letters promise, or says once that there is nothing to come: nobody hangs, and the end of the step tells everyone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.schedule.schedule import Action
from meshwright_pipeline.runtime.p2p import Arriving, Broken, Wire

if TYPE_CHECKING:
    from meshwright_pipeline.runtime.executor import Runtime

Tensor = torch.Tensor
_ROOM = 1024
"""Tags of one message: how many tensors may cross a cut together."""


@dataclass(frozen=True)
class Failure:
    """What went wrong: the action, and the error; `lost`: it is another rank's, of which nothing came, that of the stage."""

    action: Action
    error: Exception
    lost: bool = False


@dataclass(frozen=True)
class Letter:
    """How what crosses a cut lies in one step.

    Attributes:
        wire: of each value.
        batch: what the sender was given, in words.
        backward: whether it waits for gradients.
    """

    wire: Wire
    batch: str
    backward: bool


class Mail:
    """The post of one step.

    Args:
        runtime: of this rank.
        batch: what this rank was given, in words; None where it has failed already.
        backward: whether this rank runs backward passes in the step.
        fail: told of failures.
    """

    def __init__(
        self, runtime: Runtime, batch: str | None, backward: bool, fail: Callable[[Failure], None]
    ) -> None:
        self.runtime, self.batch, self.backward, self.fail = runtime, batch, backward, fail
        self.wires: dict[int, Wire] = {}  # cut -> how values lie, once that has been said
        self.returning: set[int] = set()  # cuts over which gradients come back
        self.broken: set[int] = set()  # cuts over which nothing comes
        self.gone: set[int] = set()  # ranks
        # (cut, microbatch, backward) -> what comes from another rank, or lies here for a stage of this rank
        self._arriving: dict[tuple[int, int, bool], Arriving] = {}
        self._local: dict[tuple[int, int, bool], list[Tensor]] = {}

    def return_all(self) -> None:
        """The backward passes of a step follow whose forwards have been run by themselves."""
        self.backward = True
        self.returning |= set(self.wires)

    # ---- to this rank
    def arrive(self, action: Action) -> list[Tensor] | None:
        """The local tensors that an action needs from the stage beside it; None where they will not come."""
        try:
            return self._given(action)
        except Broken:
            return None
        except RuntimeError as error:
            source = _source(action, self.runtime.shape.stages)
            assert source is not None
            if source[0] not in self.wires:
                self.broken.add(source[0])
            self._lose(self._beside(action, ahead=False), error)
            return None

    def look_ahead(self, following: Sequence[Action]) -> None:
        """Start to receive what the next of these actions waits for."""
        for coming in following:
            try:
                if self._prepare(coming):
                    return
            except RuntimeError as error:
                self._lose(self._beside(coming, ahead=False), error)
                return

    def awaited(self, action: Action) -> bool:
        """Whether the stage before waits for what a backward makes."""
        return action.kind in ("B", "I") and action.stage - 1 in self.returning

    def _given(self, action: Action) -> list[Tensor]:
        source = _source(action, self.runtime.shape.stages)
        if source is None:
            return []
        cut, stage = source
        key, peer = (cut, action.microbatch, action.kind != "F"), self.runtime.peer(stage)
        if cut in self.broken or peer in self.gone:
            raise Broken
        if peer is None:
            found = self._local.pop(key, None)
            if found is None:
                raise Broken
            return found
        if action.kind == "F" and cut not in self.wires:
            self._open(action, peer, cut)
        elif action.kind != "F" and cut not in self.returning:
            raise Broken
        self._prepare(action)
        arrived = self._arriving.pop(key).wait()
        self.runtime.transport.taken(peer, self.runtime.places[self._beside(action, ahead=False)])
        return arrived

    def _open(self, action: Action, peer: int, cut: int) -> None:
        """Read the letter of a cut."""
        try:
            content = self.runtime.transport.hear(peer, cut)
        except Broken:
            self.broken.add(cut)
            raise
        known = self.runtime.heard.get(cut)
        if known is None or known[0] != content:
            known = self.runtime.heard[cut] = (content, pickle.loads(content))
        letter = known[1]
        self.wires[cut] = letter.wire
        if letter.backward:
            self.returning.add(cut)
        if self.batch is None or (letter.batch, letter.backward) == (self.batch, self.backward):
            return
        if letter.batch == self.batch:
            mine, theirs = ("with gradients", "without") if self.backward else ("without gradients", "with")
            text = f"the model was called {mine} here and {theirs} them there; call it alike on every rank"
        else:
            text = (
                f"it was given {self.batch}, and the stage before it {letter.batch}; a plain tensor is the whole batch, so give "
                "every rank the same (mw.shard_loader reads each rank's part)"
            )
        self.fail(Failure(action, UsageError(text)))

    def _prepare(self, action: Action) -> bool:
        """Start to receive what an action needs, as far as it is known how that lies; whether it needs anything."""
        source = _source(action, self.runtime.shape.stages)
        if source is None or self.runtime.peer(source[1]) is None:
            return False
        cut, stage = source
        backward = action.kind != "F"
        key, peer = (cut, action.microbatch, backward), self.runtime.peer(stage)
        wire = self._wire(cut, backward)
        off = cut in self.broken or (backward and cut not in self.returning)
        if peer is None or wire is None or key in self._arriving or off or peer in self.gone:
            return True
        self._arriving[key] = self.runtime.transport.receive(wire, peer, self._tag(*key))
        return True

    # ---- from this rank
    def pass_on(self, action: Action, made: list[Tensor] | None) -> None:
        """Send what an action has made; None: it has failed, and messages are only kept in step."""
        try:
            self._pass_on(action, made)
        except RuntimeError as error:
            self._lose(self._beside(action, ahead=True), error)

    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        lost = self.runtime.transport.settle(self.gone)
        if lost is not None:
            sent, error = lost
            self._lose(self.runtime.table.ranks[sent.peer][sent.place], error)

    def _pass_on(self, action: Action, made: list[Tensor] | None) -> None:
        if action.kind == "W":
            return
        backward = action.kind != "F"
        cut = action.stage - 1 if backward else action.stage
        if not 0 <= cut < self.runtime.shape.stages - 1 or cut in self.broken:
            return
        peer = self.runtime.peer(action.stage - 1 if backward else action.stage + 1)
        key = (cut, action.microbatch, backward)
        if not backward and cut not in self.wires:
            self._begin(action, cut, peer, made is not None)
        if cut in self.broken or (backward and cut not in self.returning):
            return
        if peer is None:
            if made is not None:
                self._local[key] = made
            return
        if peer in self.gone:
            return
        if made is None:
            wire = self._wire(cut, backward)
            assert wire is not None
            made = [one.empty(self.runtime.transport.device) for one in wire]
        place = self.runtime.places[self._beside(action, ahead=True)]
        self.runtime.transport.send(made, peer, self._tag(*key), "backward" if backward else "forward", place)

    def _begin(self, action: Action, cut: int, peer: int | None, sound: bool) -> None:
        """Write the letter of a cut, or that there is nothing to come."""
        if not sound:
            self.broken.add(cut)
        else:
            self.wires[cut] = self.runtime.wires[cut]
            if self.backward:
                self.returning.add(cut)
        if peer is None or peer in self.gone:
            return
        letter = None
        if sound and self.batch is not None:
            letter = self.runtime.letters.get((cut, self.backward))
            if letter is None:
                letter = pickle.dumps(Letter(self.wires[cut], self.batch, self.backward))
                self.runtime.letters[cut, self.backward] = letter
        place = self.runtime.places[self._beside(action, ahead=True)]
        self.runtime.transport.announce(letter, peer, cut, place)

    # ----
    def _wire(self, cut: int, backward: bool) -> Wire | None:
        wire = self.wires.get(cut)
        if wire is None or not backward:
            return wire
        return tuple(one for one in wire if one.differentiable)

    def _tag(self, cut: int, microbatch: int, backward: bool) -> int:
        """A tag of its own for every message of a step."""
        return ((cut * self.runtime.shape.microbatches + microbatch) * 2 + backward) * _ROOM

    def _beside(self, action: Action, ahead: bool) -> Action:
        """What the stage beside does with what an action makes (`ahead`), or made for it."""
        if action.kind == "F":
            return Action("F", action.stage + (1 if ahead else -1), action.microbatch)
        stage = action.stage + (-1 if ahead else 1)
        whole = Action("B", stage, action.microbatch)
        return whole if whole in self.runtime.places else Action("I", stage, action.microbatch)

    def _lose(self, missing: Action, error: RuntimeError) -> None:
        """A message did not come or go: the rank at its other end is gone. Nothing more is said to it."""
        peer = self.runtime.peer(missing.stage)
        if peer is None:
            raise error
        self.gone.add(peer)
        text = f"it has died or hangs, since a message to or from it was lost ({str(error).splitlines()[0]})"
        self.fail(Failure(missing, ConnectionError(text), lost=True))


def _source(action: Action, stages: int) -> tuple[int, int] | None:
    """(cut, stage) that an action's input comes over and from; None where it needs none."""
    if action.kind == "W":
        return None
    if action.kind == "F":
        return (action.stage - 1, action.stage - 1) if action.stage else None
    return (action.stage, action.stage + 1) if action.stage + 1 < stages else None
