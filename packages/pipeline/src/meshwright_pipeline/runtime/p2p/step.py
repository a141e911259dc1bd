"""Point-to-point communication of one pipeline step: inputs of this rank's actions in, their outputs out.

In each step the first message over a cut is a header: it describes the tensors, says whether gradients come
back, and which batch the sender was given. Both ends follow the header, whatever they expected. So it is with
gradients: a header says which of them there are. A rank that
has failed still sends what its headers promise, or says once that nothing will come. So no rank hangs, and
the end of the step reports the failure to all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.batch_text import difference
from meshwright_dtensor.schedule.schedule import Action
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_pipeline.runtime.p2p.messages import NothingComes, Specs, Transport

Tensor = torch.Tensor
Tensors = list[Tensor | None]
_COMPLETE, _PARTS = b"complete", b"g"
"""Headers of gradients: all of them come for all microbatches (zeros, where there is none); or, for each, one that says which."""
_MAX_TENSORS = 1024
"""Tags reserved for one message: the most tensors that may cross a cut together."""


@dataclass(frozen=True)
class Failure:
    """An error in an action. `lost`: no message came from or went to the rank of this action: the error is that rank's."""

    action: Action
    error: Exception
    lost: bool = False


@dataclass(frozen=True)
class Header:
    """First message over a cut in a step: the tensors of one microbatch, what the sender was given, in words, and whether it waits
    for gradients.
    """

    specs: Specs
    batch: str
    backward: bool


@dataclass(frozen=True, slots=True)
class Route:
    """What an action takes from, or gives to, an action of a neighbouring stage.

    Attributes:
        cut, backward: over which cut, and whether these are gradients.
        other: the action at the other end. `place`: its index among the actions of its rank.
        peer: that rank; None where it is this one.
        key, tag: of the tensors; distinct for all that travels in a step.
    """

    cut: int
    backward: bool
    other: Action
    place: int
    peer: int | None
    key: tuple[int, int, bool]
    tag: int


class Peers:
    """The stages next to those of this rank, and what was exchanged with them in earlier steps.

    `sent_headers`, `received_headers`: headers of earlier steps and their pickles; one that comes again is not pickled again.
    """

    def __init__(self, transport: Transport, table: Timetable) -> None:
        self.transport, self.table, self.shape = transport, table, table.shape
        self.places = {action: place for actions in table.ranks for place, action in enumerate(actions)}
        self.sent_headers: dict[int, tuple[Header, bytes]] = {}
        self.received_headers: dict[int, tuple[bytes, Header]] = {}
        self._routes: dict[tuple[Action, bool], Route | None] = {}

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of this rank, in order."""
        return self.table.ranks[self.transport.rank]

    def peer(self, stage: int) -> int | None:
        """The rank that holds a stage; None where it is this one."""
        owner = self.table.owner(stage)
        return None if owner == self.transport.rank else owner

    def route(self, action: Action, sends: bool) -> Route | None:
        """Where the outputs of an action go (`sends`), or its inputs come from; None where it has none."""
        end = action, sends
        if end not in self._routes:
            self._routes[end] = self._route(action, sends)
        return self._routes[end]

    def _route(self, action: Action, sends: bool) -> Route | None:
        kind, stage, microbatch = action
        backward = kind != "F"
        following = stage + (1 if sends != backward else -1)
        if kind == "W" or not 0 <= following < self.shape.stages:
            return None
        other = Action("B" if backward else "F", following, microbatch)
        if other not in self.places:
            other = Action("I", following, microbatch)
        cut = min(stage, following)
        tag = ((cut * self.shape.microbatches + microbatch) * 2 + backward) * _MAX_TENSORS
        key = cut, microbatch, backward
        return Route(cut, backward, other, self.places[other], self.peer(following), key, tag)


class StepMessages:
    """The messages of one step.

    Args:
        batch: what this rank was given, in words; None where it has already failed.
        backward: whether this rank runs backward passes in the step.
        fail: called with each failure.
    """

    def __init__(
        self, peers: Peers, batch: str | None, backward: bool, fail: Callable[[Failure], None]
    ) -> None:
        self.peers, self.batch, self.backward, self.fail = peers, batch, backward, fail
        # cut -> description of its tensors, once the header is known
        self.specs: dict[int, Specs] = {}
        # cut -> description of the tensors that this rank sends over it, known before the header is sent
        self.sent_specs: dict[int, Specs] = {}
        # cuts over which gradients come back
        self.gradient_cuts: set[int] = set()
        # cut -> whether these gradients are all there, once known; if not, (cut, microbatch) -> which of them are: one device
        # has none of what nothing uses
        self.complete: dict[int, bool] = {}
        self.present: dict[tuple[int, int], tuple[bool, ...]] = {}
        # cuts over which nothing comes
        self.failed_cuts: set[int] = set()
        self.lost_ranks: set[int] = set()
        # (cut, microbatch, backward) -> tensors from another rank; tensors for another stage of this rank
        self._pending: dict[tuple[int, int, bool], Callable[[], list[Tensor]]] = {}
        self._local: dict[tuple[int, int, bool], Tensors] = {}

    def begin_backward(self) -> None:
        """From now on backward passes run, of a step whose forwards have been run separately."""
        self.backward = True
        self.gradient_cuts |= set(self.specs)

    # ---- receiving
    def inputs_of(self, action: Action) -> Tensors | None:
        """The local tensors that an action needs from the neighbouring stage (None for gradients that there are none of); None
        where they will not come.
        """
        try:
            return self._receive(action)
        except NothingComes:
            return None
        except RuntimeError as error:
            route = self.peers.route(action, sends=False)
            assert route is not None
            if route.cut not in self.specs:
                self.failed_cuts.add(route.cut)
            self._lose(route.other, error)
            return None

    def prefetch(self, following: Iterable[Action]) -> None:
        """Start to receive the inputs of the first of these actions that needs any."""
        for action in following:
            try:
                if self._start_receive(action):
                    return
            except RuntimeError as error:
                route = self.peers.route(action, sends=False)
                assert route is not None
                self._lose(route.other, error)
                return

    def awaited(self, action: Action) -> bool:
        """Whether the previous stage waits for the gradients that this action makes."""
        return action.kind in ("B", "I") and action.stage - 1 in self.gradient_cuts

    def _receive(self, action: Action) -> Tensors:
        route = self.peers.route(action, sends=False)
        if route is None:
            return []
        cut, key, peer = route.cut, route.key, route.peer
        if cut in self.failed_cuts or peer in self.lost_ranks:
            raise NothingComes
        if peer is None:
            tensors = self._local.pop(key, None)
            if tensors is None:
                raise NothingComes
            return tensors
        if not route.backward and cut not in self.specs:
            self._receive_header(action, peer, cut)
        elif route.backward and cut not in self.gradient_cuts:
            raise NothingComes
        if route.backward:
            self._receive_present(cut, action.microbatch, peer)
        self._start_receive(action)
        received: Tensors = [*self._pending.pop(key)()]
        self.peers.transport.release_sent(peer, route.place)
        present = self.present.get((cut, action.microbatch)) if route.backward else None
        if present is None:
            return received
        given = iter(received)
        return [next(given) if here else None for here in present]

    def _receive_present(self, cut: int, microbatch: int, peer: int) -> None:
        """Learn which gradients there are."""
        receive = self.peers.transport.receive_header
        if cut not in self.complete:
            self.complete[cut] = receive(peer, (cut, True)) == _COMPLETE
        if not self.complete[cut]:
            self.present[cut, microbatch] = tuple(map(bool, receive(peer, (cut, True), microbatch + 1)[1:]))

    def _receive_header(self, action: Action, peer: int, cut: int) -> None:
        try:
            content = self.peers.transport.receive_header(peer, (cut, False))
        except NothingComes:
            self.failed_cuts.add(cut)
            raise
        cached = self.peers.received_headers.get(cut)
        if cached is None or cached[0] != content:
            cached = self.peers.received_headers[cut] = (content, pickle.loads(content))
        header = cached[1]
        self.specs[cut] = header.specs
        if header.backward:
            self.gradient_cuts.add(cut)
        if self.batch is None or (header.batch, header.backward) == (self.batch, self.backward):
            return
        if header.batch == self.batch:
            here, there = ("with gradients", "without") if self.backward else ("without gradients", "with")
            text = f"the model was called {here} here and {there} them there; call it alike on every rank"
        else:
            text = difference("it", self.batch, header.batch, "the stage before it")
        self.fail(Failure(action, UsageError(text)))

    def _start_receive(self, action: Action) -> bool:
        """Start to receive an action's inputs where their description is known. Returns whether it needs any."""
        route = self.peers.route(action, sends=False)
        if route is None or route.peer is None:
            return False
        cut, key, peer = route.cut, route.key, route.peer
        if key in self._pending:
            return True
        specs = self._specs(*key)
        nothing_comes = cut in self.failed_cuts or (route.backward and cut not in self.gradient_cuts)
        if specs is not None and not nothing_comes and peer not in self.lost_ranks:
            self._pending[key] = self.peers.transport.receive(specs, peer, (cut, route.backward), route.tag)
        return True

    # ---- sending
    def send_outputs(self, action: Action, outputs: Tensors | None) -> None:
        """Send the outputs of an action; None: it has failed, and only what was promised is sent."""
        try:
            self._send(action, outputs)
        except RuntimeError as error:
            route = self.peers.route(action, sends=True)
            assert route is not None
            self._lose(route.other, error)

    def flush(self) -> None:
        """Wait until all messages have left."""
        lost = self.peers.transport.flush(self.lost_ranks)
        if lost is not None:
            sent, error = lost
            self._lose(self.peers.table.ranks[sent.peer][sent.place], error)

    def _send(self, action: Action, outputs: Tensors | None) -> None:
        route = self.peers.route(action, sends=True)
        if route is None or route.cut in self.failed_cuts:
            return
        cut, peer, backward = route.cut, route.peer, route.backward
        if not backward and cut not in self.specs:
            self._send_header(route, outputs is not None)
        if cut in self.failed_cuts or (backward and cut not in self.gradient_cuts):
            return
        if peer is None:
            if outputs is not None:
                self._local[route.key] = outputs
            return
        if peer in self.lost_ranks:
            return
        if backward:
            outputs = self._present(cut, action.microbatch, peer, outputs, route.place)
        specs = self._specs(*route.key)
        assert specs is not None
        sent = [None] * len(specs) if outputs is None else outputs
        device = self.peers.transport.device
        tensors = [
            spec.empty(device).zero_() if x is None else x for spec, x in zip(specs, sent, strict=True)
        ]
        self.peers.transport.send(tensors, specs, peer, (cut, backward), route.tag, route.place)

    def _present(
        self, cut: int, microbatch: int, peer: int, gradients: Tensors | None, place: int
    ) -> Tensors | None:
        """Those of the gradients that are sent, after a header that says which."""
        send = self.peers.transport.send_header
        if cut not in self.complete:
            self.complete[cut] = gradients is None or all(gradient is not None for gradient in gradients)
            send(_COMPLETE if self.complete[cut] else _PARTS, peer, (cut, True), place)
        if self.complete[cut]:
            return gradients
        count = sum(spec.differentiable for spec in self.specs[cut])
        present = [True] * count if gradients is None else [gradient is not None for gradient in gradients]
        self.present[cut, microbatch] = tuple(present)
        send(_PARTS + bytes(present), peer, (cut, True), place, microbatch + 1)
        return gradients and [gradient for gradient in gradients if gradient is not None]

    def _send_header(self, route: Route, succeeded: bool) -> None:
        """Send the header of a cut, or that nothing will come over it."""
        cut, peer = route.cut, route.peer
        if not succeeded:
            self.failed_cuts.add(cut)
        else:
            self.specs[cut] = self.sent_specs[cut]
            if self.backward:
                self.gradient_cuts.add(cut)
        if peer is None or peer in self.lost_ranks:
            return
        content = None
        if succeeded and self.batch is not None:
            header = Header(self.specs[cut], self.batch, self.backward)
            cached = self.peers.sent_headers.get(cut)
            if cached is None or cached[0] != header:
                cached = self.peers.sent_headers[cut] = (header, pickle.dumps(header))
            content = cached[1]
        self.peers.transport.send_header(content, peer, (cut, False), route.place)

    # ----
    def _specs(self, cut: int, microbatch: int, backward: bool) -> Specs | None:
        specs = self.specs.get(cut)
        if specs is None or not backward:
            return specs
        trained = tuple(spec for spec in specs if spec.differentiable)
        if self.complete.get(cut):
            return trained
        present = self.present.get((cut, microbatch))
        return None if present is None else tuple(s for s, here in zip(trained, present, strict=True) if here)

    def _lose(self, missing: Action, error: RuntimeError) -> None:
        """Record that the rank of action `missing` is gone: a message to or from it was lost. It gets no more messages."""
        peer = self.peers.peer(missing.stage)
        if peer is None:
            raise error
        self.lost_ranks.add(peer)
        text = f"it has died or hangs, since a message to or from it was lost ({str(error).splitlines()[0]})"
        self.fail(Failure(missing, ConnectionError(text), lost=True))
