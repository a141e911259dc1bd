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
    it has joined on `after` (a group and stream) has ended, if that is later.
    """

    group: frozenset[Actor]
    stream: str
    seconds: float
    after: tuple[frozenset[Actor], str] | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until all collectives that the actor has joined on this stream have ended."""

    group: frozenset[Actor]
    stream: str
    what: str


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
    waiting: dict[Hashable, list[Actor]] = defaultdict(list)
    ready = list(programs)
    while ready:
        actor = ready.pop()
        program, spans = programs[actor], outcome.spans[actor]
        while place[actor] < len(program):
            op, now = program[place[actor]], clock[actor]
            if isinstance(op, Work):
                clock[actor] = now + op.seconds
                if op.seconds:
                    spans.append(Span(now, clock[actor], op.what, op.kind))
            elif isinstance(op, Send):
                arrivals[op.key] = (now, now + op.seconds, actor)
                ready += waiting.pop(op.key, [])
            elif isinstance(op, Post):
                key, joined = (op.group, op.stream), now
                if op.after is not None and joins[actor, *op.after]:
                    number, done = joins[actor, *op.after], streams[op.after].done
                    if len(done) < number:
                        waiting[op.after].append(actor)
                        break
                    joined = max(now, done[number - 1][1])
                if _join(streams[key], actor, joins[actor, *key], joined, op):
                    ready += waiting.pop(key, [])
                joins[actor, *key] += 1
            elif isinstance(op, Drain):
                key = (op.group, op.stream)
                number, done = joins[actor, *key], streams[key].done
                if len(done) < number:
                    waiting[key].append(actor)
                    break
                for transfer in done[:number]:
                    clock[actor] = _wait(spans, clock[actor], transfer, op.what)
            else:
                if op.key not in arrivals:
                    waiting[op.key].append(actor)
                    break
                clock[actor] = _wait(spans, now, arrivals[op.key], op.what)
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


def _wait(spans: list[Span], now: float, found: tuple[float, float, Actor], what: str) -> float:
    """Wait until a transfer has ended: first for whoever it waits for, then for the transfer itself."""
    start, end, who = found
    if end <= now:
        return now
    if start > now:
        spans.append(Span(now, start, what, "wait", who))
    spans.append(Span(max(now, start), end, what, "communication"))
    return end
