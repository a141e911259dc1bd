"""Discrete events: actors that compute, send messages, join collectives and wait for each other.

Every actor has a fixed list of operations. Nothing is random, and no operation depends on times. So times follow from one pass
over the dependencies: an operation starts when its actor is free and everything that it waits for has happened.

So the end of each operation is the length of the longest chain of operations before it, and a chain has each operation once. If
an operation takes longer, no other ends earlier, and none ends later by more than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from meshwright_dtensor.errors import UsageError

Actor: TypeAlias = Hashable
Stream: TypeAlias = "tuple[frozenset[Actor], str]"
"""The collectives of one group that run one after the other: the group, and a name."""


@dataclass(frozen=True, slots=True)
class Work:
    """The actor is busy for `seconds`. kind: "compute", "communication" or "optimizer"."""

    seconds: float
    what: str
    kind: str = "compute"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message that arrives `seconds` later. The actor does not wait."""

    key: Hashable
    seconds: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message. what: its content, in words."""

    key: Hashable
    what: str


@dataclass(frozen=True, slots=True)
class Join:
    """Join the next collective of `group` on `stream`. The actor does not wait.

    The collective starts when every member has joined and the one before it has ended, and takes `seconds`.

    Args:
        after: a stream. The actor joins no earlier than the collectives that it has joined there have ended.
        lane: the link that the bytes cross. Collectives of one actor on one lane run one after the other, across groups.
    """

    group: frozenset[Actor]
    stream: str
    seconds: float
    after: Stream | None = None
    lane: str | None = None


Joins: TypeAlias = list[tuple[float, Join]]
"""Collectives in order, each with a number: the fraction of the pass after which it is joined, or a weight."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until all collectives that the actor has joined on this stream have ended."""

    group: frozenset[Actor]
    stream: str
    what: str


Operation: TypeAlias = Work | Send | Receive | Join | Wait


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of an actor's time. kind: that of Work; "wait" for another actor, or "communication" for a transfer.

    culprit: the actor that is waited for.
    """

    start: float
    end: float
    what: str
    kind: str
    culprit: Actor | None = None

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass
class Outcome:
    """The result of a simulation: per actor its spans, in order, and its end."""

    spans: dict[Actor, list[Span]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[Actor, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The end of the last actor."""
        return max(self.ends.values(), default=0.0)


@dataclass
class _Collectives:
    """Collectives of one stream: the time at which each member joined each, and (start, end, last member) of those done."""

    joined: list[dict[Actor, float]] = field(default_factory=list)
    done: list[tuple[float, float, Actor]] = field(default_factory=list)

    def join(self, actor: Actor, number: int, now: float, op: Join) -> bool:
        """An actor joins collective `number`. Returns whether a collective can end now."""
        while len(self.joined) <= number:
            self.joined.append({})
        self.joined[number][actor] = now
        count = len(self.done)
        while len(self.done) < len(self.joined):
            members = self.joined[len(self.done)]
            if len(members) < len(op.group):
                break
            last = max(members, key=lambda a: members[a])
            start = max(members[last], self.done[-1][1] if self.done else 0.0)
            self.done.append((start, start + op.seconds, last))
        return len(self.done) > count


class _EventLoop:
    """Executes the programs: times, messages and collectives."""

    def __init__(self, programs: Mapping[Actor, Sequence[Operation]]) -> None:
        self.programs = programs
        self.outcome = Outcome()
        self.clock: dict[Actor, float] = dict.fromkeys(programs, 0.0)
        self.next: dict[Actor, int] = dict.fromkeys(programs, 0)
        # sent, arrived, sender
        self.messages: dict[Hashable, tuple[float, float, Actor]] = {}
        self.collectives: dict[Stream, _Collectives] = defaultdict(_Collectives)
        self.joined: dict[tuple[Actor, Stream], int] = defaultdict(int)
        self.awaited: dict[tuple[Actor, Stream], int] = defaultdict(int)
        # the last collective on each
        self.lanes: dict[tuple[Actor, str], tuple[Stream, int]] = {}
        self.waiting: dict[Hashable, list[Actor]] = defaultdict(list)
        self.ready = list(programs)

    def run(self) -> Outcome:
        while self.ready:
            actor = self.ready.pop()
            program = self.programs[actor]
            while self.next[actor] < len(program):
                missing = self._execute(actor, program[self.next[actor]])
                if missing is not None:
                    self.waiting[missing].append(actor)
                    break
                self.next[actor] += 1
            self.outcome.ends[actor] = self.clock[actor]
        stuck = [actor for actor, program in self.programs.items() if self.next[actor] < len(program)]
        if stuck:
            shown = ", ".join(f"{actor} at {self.programs[actor][self.next[actor]]}" for actor in stuck[:3])
            raise UsageError(f"the schedule would hang: {len(stuck)} actors wait for ever ({shown})")
        return self.outcome

    def _execute(self, actor: Actor, op: Operation) -> Hashable | None:
        """Execute an operation; returns the message or stream that it waits for, None when it is done."""
        now = self.clock[actor]
        match op:
            case Work():
                self.clock[actor] = now + op.seconds
                if op.seconds:
                    self.outcome.spans[actor].append(Span(now, self.clock[actor], op.what, op.kind))
            case Send():
                self.messages[op.key] = (now, now + op.seconds, actor)
                self.ready += self.waiting.pop(op.key, [])
            case Join():
                return self._join(actor, op)
            case Wait():
                return self._await(actor, op)
            case Receive():
                if op.key not in self.messages:
                    return op.key
                self._wait(actor, self.messages[op.key], op.what)
        return None

    def _join(self, actor: Actor, op: Join) -> Stream | None:
        stream = (op.group, op.stream)
        before = [] if op.after is None else [(op.after, self.joined[actor, op.after])]
        if op.lane is not None and (actor, op.lane) in self.lanes:
            before.append(self.lanes[actor, op.lane])
        for other, count in before:
            if len(self.collectives[other].done) < count:
                return other
        ends = (self.collectives[other].done[count - 1][1] for other, count in before if count)
        now = max([self.clock[actor], *ends])
        if self.collectives[stream].join(actor, self.joined[actor, stream], now, op):
            self.ready += self.waiting.pop(stream, [])
        self.joined[actor, stream] += 1
        if op.lane is not None:
            self.lanes[actor, op.lane] = (stream, self.joined[actor, stream])
        return None

    def _await(self, actor: Actor, op: Wait) -> Stream | None:
        stream = (op.group, op.stream)
        number, done = self.joined[actor, stream], self.collectives[stream].done
        if len(done) < number:
            return stream
        for transfer in done[self.awaited[actor, stream] : number]:
            self._wait(actor, transfer, op.what)
        self.awaited[actor, stream] = number
        return None

    def _wait(self, actor: Actor, transfer: tuple[float, float, Actor], what: str) -> None:
        """Wait until a transfer has ended: first for its last member, then for the transfer itself.

        When the last member is the actor itself, its lane was in use.
        """
        start, end, last = transfer
        now, spans = self.clock[actor], self.outcome.spans[actor]
        if end <= now:
            return
        if start > now:
            spans.append(Span(now, start, what, *(("communication",) if last == actor else ("wait", last))))
        if end > start:
            spans.append(Span(max(now, start), end, what, "communication"))
        self.clock[actor] = end


def run(programs: Mapping[Actor, Sequence[Operation]]) -> Outcome:
    """Execute all programs from time 0. Raises UsageError where actors wait for each other for ever."""
    return _EventLoop(programs).run()
