"""Discrete events: actors that compute, send, meet in collectives and wait for each other.

Every actor has a fixed list of operations. Nothing is random, and what an actor does never depends on times, so that times
follow from one pass over the dependencies: an operation starts when its actor is free and what it needs has happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from meshwright_dtensor.errors import UsageError

Actor: TypeAlias = Hashable


@dataclass(frozen=True, slots=True)
class Work:
    """The actor is busy for `seconds`. kind: "compute", "communication" or "optimizer"."""

    seconds: float
    what: str
    kind: str = "compute"


@dataclass(frozen=True, slots=True)
class Send:
    """A message leaves; it arrives `seconds` later, and the actor goes on at once."""

    key: Hashable
    seconds: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for a message. what: what it brings, for people."""

    key: Hashable
    what: str


@dataclass(frozen=True, slots=True)
class Post:
    """Join the next collective of `group`, and go on at once.

    It starts when every member has joined and the one before it has ended, and takes `seconds`. A member joins when what
    it has joined on `after` (a group and stream) has ended, if that is later.  `lane`: what its bytes cross; collectives
    that an actor joins on one lane take turns, whatever groups they are of.
    """

    group: frozenset[Actor]
    stream: str
    seconds: float
    after: tuple[frozenset[Actor], str] | None = None
    lane: str | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until all collectives that the actor has joined on this stream have ended.

    `taken`: the part of the time that they ran beside the actor's work by which that took longer.
    """

    group: frozenset[Actor]
    stream: str
    what: str
    taken: float = 0.0


Operation: TypeAlias = Work | Send | Receive | Post | Drain


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when an actor did something. kind: that of Work; "wait" for another, or "communication" for a transfer.

    culprit: the actor that is waited for.
    """

    start: float
    end: float
    what: str
    kind: str
    culprit: Actor | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass
class Outcome:
    """What happened: per actor its spans, in order, and when it was done."""

    spans: dict[Actor, list[Span]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[Actor, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """When the last actor was done."""
        return max(self.ends.values(), default=0.0)


@dataclass
class _Stream:
    """Collectives of one group: who joined each and when, and when it ended."""

    joined: list[dict[Actor, float]] = field(default_factory=list)
    done: list[tuple[float, float, Actor]] = field(default_factory=list)  # start, end, who was last


def run(programs: Mapping[Actor, Sequence[Operation]]) -> Outcome:
    """Carry out all programs from time 0.

    Raises:
        UsageError: some wait for each other for ever.
    """
    outcome = Outcome()
    clock: dict[Actor, float] = dict.fromkeys(programs, 0.0)
    place: dict[Actor, int] = dict.fromkeys(programs, 0)
    arrivals: dict[Hashable, tuple[float, float, Actor]] = {}  # sent, there, by whom
    streams: dict[tuple[frozenset[Actor], str], _Stream] = defaultdict(_Stream)
    joins: dict[tuple[Actor, frozenset[Actor], str], int] = defaultdict(int)
    drained: dict[tuple[Actor, frozenset[Actor], str], int] = defaultdict(int)
    worked: dict[Actor, float] = dict.fromkeys(programs, 0.0)  # until when
    lanes: dict[
        tuple[Actor, str], tuple[tuple[frozenset[Actor], str], int]
    ] = {}  # the last one that was joined
    waiting: dict[Hashable, list[Actor]] = defaultdict(list)
    ready = list(programs)
    while ready:
        actor = ready.pop()
        program, spans = programs[actor], outcome.spans[actor]
        while place[actor] < len(program):
            op, now = program[place[actor]], clock[actor]
            if isinstance(op, Work):
                clock[actor] = worked[actor] = now + op.seconds
                if op.seconds:
                    spans.append(Span(now, clock[actor], op.what, op.kind))
            elif isinstance(op, Send):
                arrivals[op.key] = (now, now + op.seconds, actor)
                ready += waiting.pop(op.key, [])
            elif isinstance(op, Post):
                key, joined = (op.group, op.stream), now
                before = [] if op.after is None else [(op.after, joins[actor, *op.after])]
                if op.lane is not None and (actor, op.lane) in lanes:
                    before.append(lanes[actor, op.lane])
                unknown = next((other for other, count in before if len(streams[other].done) < count), None)
                if unknown is not None:
                    waiting[unknown].append(actor)
                    break
                joined = max([now, *(streams[other].done[count - 1][1] for other, count in before if count)])
                if _join(streams[key], actor, joins[actor, *key], joined, op):
                    ready += waiting.pop(key, [])
                joins[actor, *key] += 1
                if op.lane is not None:
                    lanes[actor, op.lane] = (key, joins[actor, *key])
            elif isinstance(op, Drain):
                key = (op.group, op.stream)
                number, done = joins[actor, *key], streams[key].done
                if len(done) < number:
                    waiting[key].append(actor)
                    break
                beside = 0.0
                for transfer in done[drained[actor, *key] : number]:
                    beside += max(0.0, min(transfer[1], worked[actor]) - transfer[0])
                    clock[actor] = _wait(spans, actor, clock[actor], transfer, op.what)
                drained[actor, *key] = number
                if op.taken * beside:
                    begin, clock[actor] = clock[actor], clock[actor] + op.taken * beside
                    spans.append(Span(begin, clock[actor], f"slower beside {op.what}", "communication"))
            else:
                if op.key not in arrivals:
                    waiting[op.key].append(actor)
                    break
                clock[actor] = _wait(spans, actor, now, arrivals[op.key], op.what)
            place[actor] += 1
        outcome.ends[actor] = clock[actor]
    stuck = [actor for actor, program in programs.items() if place[actor] < len(program)]
    if stuck:
        shown = ", ".join(f"{actor} at {programs[actor][place[actor]]}" for actor in stuck[:3])
        raise UsageError(f"the schedule would hang: {len(stuck)} actors wait for ever ({shown})")
    return outcome


def _join(stream: _Stream, actor: Actor, number: int, now: float, op: Post) -> bool:
    """Note that an actor joins collective `number`; whether that lets one end."""
    while len(stream.joined) <= number:
        stream.joined.append({})
    stream.joined[number][actor] = now
    ended = len(stream.done)
    while len(stream.done) < len(stream.joined):
        members = stream.joined[len(stream.done)]
        if len(members) < len(op.group):
            break
        last = max(members, key=lambda a: members[a])
        before = stream.done[-1][1] if stream.done else 0.0
        start = max(members[last], before)
        stream.done.append((start, start + op.seconds, last))
    return len(stream.done) > ended


def _wait(spans: list[Span], actor: Actor, now: float, found: tuple[float, float, Actor], what: str) -> float:
    """Wait until a transfer has ended: first for whoever it waits for, then for the transfer itself.

    Where that is the actor itself, its lane was taken.
    """
    start, end, who = found
    if end <= now:
        return now
    if start > now:
        spans.append(Span(now, start, what, *(("communication",) if who == actor else ("wait", who))))
    if end > start:
        spans.append(Span(max(now, start), end, what, "communication"))
    return end
