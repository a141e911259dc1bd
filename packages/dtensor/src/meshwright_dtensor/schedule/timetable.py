"""Check that a schedule can run, and when each of its actions ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, NoReturn, cast

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.schedule.schedule import NAMES, Action, Kind, Schedule, Shape

DURATION: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})


@dataclass(frozen=True)
class Timetable:
    """A checked schedule.

    Attributes:
        schedule, shape: the schedule, and the pipeline that it runs.
        ranks: per rank, its actions in order.
        alive: per rank, the largest number of microbatches, over all of its stages, that it holds
            activations of at once.
        ends: when each action ends, with the times in DURATION and messages that take no time.
        order: every action with its rank, after the actions that it depends on.
    """

    schedule: Schedule
    shape: Shape
    ranks: tuple[tuple[Action, ...], ...]
    alive: tuple[int, ...]
    ends: dict[Action, float]
    order: tuple[tuple[int, Action], ...]

    def owner(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self.schedule.owner(stage, self.shape)

    @property
    def length(self) -> float:
        """When the last action ends."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The part of a step in which the average rank waits."""
        busy = sum(DURATION[action.kind] for actions in self.ranks for action in actions)
        return 1.0 - busy / (self.length * len(self.ranks))


class OrderedActions(NamedTuple):
    """The actions of a schedule that can run.

    Attributes:
        ranks: per rank, its actions in order.
        segments: (rank, index of the first action, index after the last one). In this sequence of
            segments every action comes after the actions that it depends on.
        numbers: per rank, the number of each action (see `_numbered`).
        waits: per rank, for each action, the number of the action on another stage that it waits for.
    """

    ranks: tuple[tuple[Action, ...], ...]
    segments: list[tuple[int, int, int]]
    numbers: list[list[int]]
    waits: list[list[int]]

    @property
    def split(self) -> set[tuple[int, int]]:
        """(stage, microbatch) of split backwards."""
        return _split(self.ranks)

    @property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """Every action with its rank, after the actions that it depends on."""
        return tuple((rank, a) for rank, begin, end in self.segments for a in self.ranks[rank][begin:end])


def check_accepts(schedule: Schedule, shape: Shape) -> None:
    """Ask the schedule whether it can run the pipeline: UsageError if it refuses. Its actions are not checked."""
    refusal = schedule.refusal(shape)
    if refusal is not None:
        raise UsageError(f"schedule {schedule.name!r}: {refusal}")


def ordered(schedule: Schedule, shape: Shape) -> OrderedActions:
    """The actions of a schedule, in an order in which they can run.

    Raises UsageError if the schedule refuses the pipeline, or its actions are incomplete or wait for each other.
    """
    check_accepts(schedule, shape)
    ranks = tuple(tuple(schedule.actions(rank, shape)) for rank in range(shape.ranks))
    numbers = _numbered(schedule, shape, ranks)
    waits = [_waits(rank_numbers, shape) for rank_numbers in numbers]
    return OrderedActions(ranks, _segments(schedule, shape, ranks, numbers, waits), numbers, waits)


def timetable(schedule: Schedule, shape: Shape) -> Timetable:
    """Simulate a schedule with the times in DURATION. Raises UsageError as `ordered` does."""
    actions = ordered(schedule, shape)
    order, split = actions.order, actions.split
    ends: dict[Action, float] = {}
    clock, held, most = [0.0] * shape.ranks, [0] * shape.ranks, [0] * shape.ranks
    for rank, action in order:
        start = max([clock[rank], *(ends[needed] for needed in dependencies(action, shape, split))])
        clock[rank] = ends[action] = start + DURATION[action.kind]
        held[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
        most[rank] = max(most[rank], held[rank])
    return Timetable(schedule, shape, actions.ranks, tuple(most), ends, order)


def _split(ranks: Sequence[Sequence[Action]]) -> set[tuple[int, int]]:
    """(stage, microbatch) of split backwards."""
    return {(a.stage, a.microbatch) for actions in ranks for a in actions if a.kind == "I"}


def _numbered(schedule: Schedule, shape: Shape, ranks: Sequence[Sequence[Action]]) -> list[list[int]]:
    """Per rank, the number of each action. Raises where the actions are incomplete.

    Numbers go by kind, then stage, then microbatch. The kinds are: forwards; whole backwards and first
    halves of split ones, which share numbers; second halves.
    """
    count, per_kind = shape.microbatches, shape.stages * shape.microbatches
    first = {"F": 0, "B": per_kind, "I": per_kind, "W": 2 * per_kind}
    owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
    held = [{stage for stage, owner in enumerate(owners) if owner == rank} for rank in range(shape.ranks)]
    numbers: list[list[int]] = []
    halves: list[list[int]] = [[], []]
    complete = True
    for rank, actions in enumerate(ranks):
        kinds, stages, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
        complete &= held[rank].issuperset(stages) and first.keys() >= set(kinds)
        complete &= not actions or (min(microbatches) >= 0 and max(microbatches) < count)
        if not complete:
            break
        numbers.append([first[kind] + stage * count + m for kind, stage, m in actions])
        for half, places in zip("IW", halves, strict=True):
            if half in kinds:
                places += [stage * count + m for kind, stage, m in actions if kind == half]
    if complete:
        distinct = set(itertools.chain.from_iterable(numbers))
        complete = sum(map(len, numbers)) == len(distinct) == 2 * per_kind + len(halves[0])
        complete = complete and set(halves[0]) == set(halves[1])
    if not complete:
        _report_incomplete(schedule, shape, ranks)
    return numbers


def _report_incomplete(schedule: Schedule, shape: Shape, ranks: Sequence[Sequence[Action]]) -> None:
    """Raise a UsageError that names the first action which is wrong or missing."""
    where = f"schedule {schedule.name!r}"
    owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
    kinds = {place: set[str]() for place in itertools.product(range(shape.stages), range(shape.microbatches))}
    for rank, actions in enumerate(ranks):
        for action in actions:
            kind, stage, microbatch = action
            has = f"{where}: rank {rank} has {action}"
            if (stage, microbatch) not in kinds:
                last = f"0..{shape.stages - 1} and microbatches 0..{shape.microbatches - 1}"
                raise UsageError(f"{has}, but there are stages {last}")
            if kind not in NAMES:
                raise UsageError(f"{has}; the kinds of actions are {', '.join(NAMES)}")
            if kind in kinds[stage, microbatch]:
                first = next(number for number, earlier in enumerate(ranks) if action in earlier)
                raise UsageError(f"{where}: {action} comes twice, on rank {first} and on rank {rank}")
            if owners[stage] != rank:
                raise UsageError(f"{has}, but that stage is on rank {owners[stage]}; move it to that rank")
            kinds[stage, microbatch].add(kind)
    for place, present in kinds.items():
        # a forward, and its backward whole or in two halves
        if present != {"F", "B"} and present != {"F", "I", "W"}:
            _report_microbatch(where, present, *place)


def _report_microbatch(where: str, kinds: set[str], stage: int, microbatch: int) -> NoReturn:
    """Raise for a microbatch that does not run forward and backward once on a stage."""

    def action(kind: str) -> Action:
        return Action(cast(Kind, kind), stage, microbatch)

    halves = kinds & {"I", "W"}
    if "B" in kinds and halves:
        raise UsageError(f"{where}: {action(min(halves))} is a part of {action('B')}, which is there too")
    needed = ("F", "I", "W") if halves else ("F", "B")
    missing = action(next(kind for kind in needed if kind not in kinds))
    raise UsageError(f"{where}: {missing} is missing; every forward needs its backward")


def dependencies(action: Action, shape: Shape, split: set[tuple[int, int]]) -> list[Action]:
    """The actions that must end before `action` starts; `split`: (stage, microbatch) of split backwards."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [Action("I", stage, microbatch)]
    forward = Action("F", stage, microbatch)
    if stage + 1 == shape.stages:
        return [forward]
    return [forward, Action("I" if (stage + 1, microbatch) in split else "B", stage + 1, microbatch)]


def _waits(numbers: Sequence[int], shape: Shape) -> list[int]:
    """For each of these actions, the number of the one on another stage that it waits for; 3 x stages x microbatches if none."""
    count, per_kind = shape.microbatches, shape.stages * shape.microbatches
    none, last = 3 * per_kind, 2 * per_kind - count
    return [
        none if number < count or number >= last else number - count if number < per_kind else number + count
        for number in numbers
    ]


def _segments(
    schedule: Schedule,
    shape: Shape,
    ranks: Sequence[Sequence[Action]],
    numbers: Sequence[Sequence[int]],
    waits: Sequence[Sequence[int]],
) -> list[tuple[int, int, int]]:
    """See OrderedActions. Each rank in turn runs until it would wait, first to last and then last to first."""
    per_kind = shape.stages * shape.microbatches
    segments: list[tuple[int, int, int]] = []
    # number -> has run. The two last entries: "waits for nothing", and the end of a rank's actions, never reached.
    done = bytearray(3 * per_kind) + b"\1\0"
    # the action of the same stage that must run before: negative for forwards, which need none
    same_stage = [[number - per_kind for number in rank_numbers] for rank_numbers in numbers]
    other_stage = [[*rank_waits, 3 * per_kind + 1] for rank_waits in waits]
    place = [0] * shape.ranks
    moved, turns = True, range(shape.ranks)
    while moved:
        moved = False
        for rank in turns:
            begin = here = place[rank]
            mine, other, same = numbers[rank], other_stage[rank], same_stage[rank]
            while done[other[here]] and (same[here] < 0 or done[same[here]]):
                done[mine[here]] = 1
                here += 1
            if here > begin:
                moved = True
                place[rank] = here
                segments.append((rank, begin, here))
        turns = turns[::-1]
    if any(here < len(actions) for here, actions in zip(place, ranks, strict=True)):
        _report_hang(schedule, shape, ranks, place)
    return segments


def _report_hang(
    schedule: Schedule, shape: Shape, ranks: Sequence[Sequence[Action]], place: Sequence[int]
) -> NoReturn:
    """Raise for ranks that have come to `place` in their actions and wait for ever."""
    stuck = {rank: actions[place[rank]] for rank, actions in enumerate(ranks) if place[rank] < len(actions)}
    split = _split(ranks)
    past = {action for actions, end in zip(ranks, place, strict=True) for action in actions[:end]}
    missing = {
        rank: next(needed for needed in dependencies(action, shape, split) if needed not in past)
        for rank, action in stuck.items()
    }
    # name a rank that waits for a later action of its own, where there is one: that is the cause
    causes = [rank for rank in stuck if schedule.owner(missing[rank].stage, shape) == rank]
    rank = (causes or list(stuck))[0]
    others = "; ".join(f"rank {r} at {action}" for r, action in list(stuck.items())[:4] if r != rank)
    raise UsageError(
        f"schedule {schedule.name!r} would hang: rank {rank} waits at {stuck[rank]} for {missing[rank]}, which never comes"
        f"{f' ({others})' if others else ''}; move that action forward"
    )
