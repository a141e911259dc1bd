"""How long a step takes on ranks that share cores: who waits leaves its core to the others, who compute faster meanwhile.

How long a step of a schedule takes, and what its ranks hold meanwhile, from what its stages cost. Needs no process group.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_dtensor.schedule.timetable import check_accepts, ordered
from meshwright_pipeline.planning.activation_memory import KINDS, MemoryPeak, RankActions, StageBytes


@dataclass(frozen=True)
class TimedAction:
    """An action of a rank.

    Attributes:
        place: its number, from 1 on.
        seconds: that it computes for while all ranks do.
        after: the number of the action that it waits for, 0 for none.
        sending: seconds from the end of that one until what it made is here.
    """

    place: int
    seconds: float
    after: int
    sending: float


def shared_core_time(
    ranks: Sequence[Sequence[TimedAction]], company: Sequence[float]
) -> tuple[float, list[float]]:
    """Seconds until all have done what they do in their order, and for how many of them each computes.

    Processor sharing: between two events all that compute go on at the same pace, `company[n - 1]` times as long as their
    `seconds` where n of them do.

    Raises:
        ValueError: the actions wait for each other, or take no finite time.
    """
    if not all(math.isfinite(one.seconds) and math.isfinite(one.sending) for own in ranks for one in own):
        raise ValueError("every action, and what it waits for, must take a finite time")
    now, ends = 0.0, {0: 0.0}
    queues = [iter(own) for own in ranks]
    coming = [next(queue, None) for queue in queues]
    left: dict[int, float] = {}  # rank -> what is left of the action that it computes, as if all ranks did
    busy = [0.0] * len(queues)
    while True:
        arrival = math.inf
        for rank, action in enumerate(coming):
            if action is None or rank in left or action.after not in ends:
                continue
            ready = ends[action.after] + action.sending if action.after else now
            if ready <= now:
                left[rank] = action.seconds
            else:
                arrival = min(arrival, ready)
        if not left and arrival == math.inf:
            if any(action is not None for action in coming):
                raise ValueError("the actions wait for each other")
            return now, busy
        pace = company[len(left) - 1] if left else 1.0
        nearest = min(left, key=left.__getitem__) if left else -1
        step = left[nearest] * pace if left else math.inf
        done = step <= arrival - now
        step = step if done else arrival - now
        now = now + step if done else arrival
        for rank in left:
            left[rank] = max(0.0, left[rank] - step / pace)
            busy[rank] += step
        if done:  # those that end at once follow in steps of no length
            action = coming[nearest]
            assert action is not None
            ends[action.place] = now
            coming[nearest] = next(queues[nearest], None)
            del left[nearest]


MOST_ACTIONS = 6000
"""Actions that are walked through one by one; of longer steps the steady part is drawn out."""


@dataclass(frozen=True)
class StageCosts:
    """What one microbatch costs on each stage.

    Args:
        forward, backward: seconds; the two halves of a split backward take half of it each.
        saved: bytes that are kept from its forward to the end of its backward; () where nobody asks for bytes.
        sending: seconds of a message over each cut, one fewer than stages; () where they cost nothing.
        over: the most bytes that are alive while it runs backward, beyond what was kept of it; () for none.
        first: the same in the first half of a split backward; () for the same bytes.
        waiting: bytes that the first half of a split backward leaves for the second; () for none.
        gradients: bytes of the gradients of its parameters, there from the end of its first backward on; () for none.
        split: False where the first half of a backward is all of it, as in stages that run modules again.
        halving: seconds that each half of a split backward takes longer than half of a whole one; () for none.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved: tuple[float, ...] = ()
    sending: tuple[float, ...] = ()
    over: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()
    halving: tuple[float, ...] = ()
    split: bool = True
    first: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """A step in thought.

    Attributes:
        seconds: from its begin to the end of its last action.
        busy: per rank, the seconds in which it computes; on shared cores those of the clock, where messages take no time.
        held: per rank, the most bytes of activations that it holds at once.
        fullest: per rank, when it holds most, with all that there is beside activations.
        silent: what the seconds would be if messages took none.
    """

    seconds: float
    busy: tuple[float, ...]
    held: tuple[float, ...]
    fullest: tuple[MemoryPeak, ...] = ()
    silent: float = 0.0

    @property
    def bubble(self) -> float:
        """The part of the step in which the average rank waits."""
        return 1.0 - sum(self.busy) / (self.seconds * len(self.busy)) if self.seconds else 0.0


def predict(
    schedule: Schedule, shape: Shape, costs: StageCosts, company: tuple[float, ...] = ()
) -> Prediction:
    """Run a step in thought.

    `company`: for ranks that share cores, how many times as long one computes while 1, 2, ..., all of them do, against what
    `costs` say; () where each has its own device.

    Raises:
        UsageError: the schedule refuses the pipeline, is not complete, or would hang; `company` is not of as many ranks.
    """
    if company and (len(company) != shape.ranks or min(company) <= 0):
        raise UsageError(f"company={company}: it takes a positive number for each of the {shape.ranks} ranks")
    check_accepts(schedule, shape)  # of a long step, others are walked through
    walked = simulated_shapes(shape)
    if len(walked) == 1:
        return _walk(schedule, shape, costs, company)
    short, longer = (_walk(schedule, one, costs, company) for one in walked)
    few, more = (one.microbatches for one in walked)
    factor = (shape.microbatches - more) / (more - few)

    def drawn(a: float, b: float) -> float:
        return b + factor * (b - a)

    return Prediction(
        drawn(short.seconds, longer.seconds),
        tuple(map(drawn, short.busy, longer.busy)),
        tuple(map(drawn, short.held, longer.held)),
        tuple(
            MemoryPeak(drawn(a.kept, b.kept), drawn(a.over, b.over), drawn(a.gradients, b.gradients))
            for a, b in zip(short.fullest, longer.fullest, strict=True)
        ),
        drawn(short.silent, longer.silent),
    )


def simulated_shapes(shape: Shape) -> tuple[Shape, ...]:
    """What is walked through of a step: itself, or the two shorter ones that its steady part is drawn out from."""
    few, more = 2 * shape.stages, 3 * shape.stages
    # drawing out takes two walks
    if 2 * shape.stages * shape.microbatches <= MOST_ACTIONS or shape.microbatches <= few + more:
        return (shape,)
    # whatever groups a schedule takes microbatches in, as many as there are stages are whole groups
    return tuple(Shape(shape.ranks, shape.stages, count) for count in (few, more))


@functools.lru_cache(maxsize=256)
def straggler_delay(schedule: Schedule, shape: Shape) -> tuple[float, float]:
    """Seconds that ranks wait for each by which every one of them takes longer with the first microbatch, or with all.

    Forwards and what hands gradients on take longer, by as much as a forward.  It is a property of the schedule: that of equal
    stages whose backwards take twice as long as their forwards.
    """
    short = simulated_shapes(shape)[0]
    steps, stages = steps_of(schedule, short), short.stages
    lengths = (*((1.0,) * stages), *((2.0,) * stages), *((1.0,) * (2 * stages)))
    plain, first, every = ([0.0] * shape.ranks for _ in range(3))
    ends: tuple[list[float], ...] = ([0.0], [0.0], [0.0])
    begun: set[int] = set()
    longer = 0
    for rank, number, place in zip(steps.doers, steps.numbers, steps.after, strict=True):
        counts = number < 3 * stages  # forward, or whole backward, or its first half
        fresh = number not in begun and number < stages
        begun.add(number)
        longer += counts and rank == 0
        for clock, known, more in zip((plain, first, every), ends, (0.0, fresh, counts), strict=True):
            clock[rank] = max(clock[rank], known[place]) + lengths[number] + more
            known.append(clock[rank])
    length = max(plain)
    return max(0.0, (max(first) - length) / shape.each - 1.0), max(0.0, (max(every) - length) / longer - 1.0)


@functools.lru_cache(maxsize=256)
def input_gradient_share(schedule: Schedule, shape: Shape) -> float:
    """The part of a backward pass that is done when gradients of weights are left for later; 1 where none is split."""
    short = simulated_shapes(shape)[0]
    kinds = [number // short.stages for number in steps_of(schedule, short).numbers]
    whole, halves = kinds.count(KINDS.index("B")), kinds.count(KINDS.index("I"))
    return (whole + halves / 2) / (whole + halves)


@dataclass(frozen=True)
class Steps:
    """A checked schedule in numbers.

    Attributes:
        doers, numbers, after: of each action, in an order in which each comes behind what it waits for: rank, kind and stage
            in one number (as in `_lengths`), and place (from 1 on) of what it waits for on another rank, 0 for nothing.
        cuts: by kind and stage, the cut that the message crosses which an action waits for; -1 for none.
        ranks: the kinds (as in KINDS) and stages of each rank alone, in one number.
        actions: the same, for what they hold.
    """

    doers: tuple[int, ...]
    numbers: tuple[int, ...]
    after: tuple[int, ...]
    cuts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    actions: RankActions


def _lengths(costs: StageCosts) -> tuple[float, ...]:
    """Seconds of an action by its kind, as in KINDS, and its stage."""
    stages = len(costs.forward)
    if not costs.split:
        return (*costs.forward, *costs.backward, *costs.backward, *((0.0,) * stages))
    more = costs.halving or (0.0,) * stages
    half = tuple(b / 2 + longer for b, longer in zip(costs.backward, more, strict=True))
    return (*costs.forward, *costs.backward, *half, *half)


def _walk(schedule: Schedule, shape: Shape, costs: StageCosts, company: tuple[float, ...]) -> Prediction:
    steps, lengths = steps_of(schedule, shape), _lengths(costs)
    sending = (*(costs.sending or (0.0,) * shape.stages), 0.0)  # the last one is that of no message, -1
    late = [sending[cut] for cut in steps.cuts]
    held, fullest = _held(steps, shape, costs) if costs.saved else ((0.0,) * shape.ranks, ())
    if company:
        work = _by_rank(steps, lengths, late)
        seconds, _ = shared_core_time(work, company)
        alone, computing = shared_core_time(
            [[replace(one, sending=0.0) for one in own] for own in work], company
        )
        return Prediction(seconds, tuple(computing), held, fullest, alone)
    clock, silent = ([0.0] * shape.ranks for _ in range(2))
    ends, quiet = [0.0], [0.0]  # the first one is that of nothing; with messages, and if they took no time
    lasting, delays = (map(own.__getitem__, steps.numbers) for own in (lengths, late))
    for rank, length, place, delay in zip(steps.doers, lasting, steps.after, delays, strict=True):
        start, arrival = clock[rank], ends[place] + delay
        if arrival > start:
            start = arrival
        clock[rank] = end = start + length
        ends.append(end)
        start, arrival = silent[rank], quiet[place]
        if arrival > start:
            start = arrival
        silent[rank] = end = start + length
        quiet.append(end)
    busy = tuple(sum(map(lengths.__getitem__, own), 0.0) for own in steps.ranks)
    return Prediction(max(clock), busy, held, fullest, max(silent))


def _by_rank(steps: Steps, lengths: Sequence[float], late: Sequence[float]) -> list[list[TimedAction]]:
    """What each rank does in its own order."""
    found: list[list[TimedAction]] = [[] for _ in steps.ranks]
    every = zip(steps.doers, steps.numbers, steps.after, strict=True)
    for place, (rank, number, after) in enumerate(every, 1):
        found[rank].append(TimedAction(place, lengths[number], after, late[number]))
    return found


def _held(steps: Steps, shape: Shape, costs: StageCosts) -> tuple[tuple[float, ...], tuple[MemoryPeak, ...]]:
    """What ranks hold, as in Prediction."""
    nothing = (0.0,) * shape.stages
    over, waiting, gradients = (own or nothing for own in (costs.over, costs.deferred_bytes, costs.gradients))
    return steps.actions.held(
        StageBytes(costs.saved, over, waiting, gradients, costs.split, costs.first or over)
    )


@functools.lru_cache(maxsize=256)
def steps_of(schedule: Schedule, shape: Shape) -> Steps:
    """The actions of a checked schedule; kept, since a search asks for the same ones again and again."""
    found = ordered(schedule, shape)
    owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
    first = {kind: number * shape.stages for number, kind in enumerate(KINDS)}
    # what flows forwards comes from the stage before, gradients from the one behind
    before = [stage > 0 and owners[stage - 1] != rank for stage, rank in enumerate(owners)]
    behind = [*before[1:], False]
    cuts = [stage - 1 if waits else -1 for stage, waits in enumerate(before)]
    cuts += [stage if waits else -1 for _ in "BI" for stage, waits in enumerate(behind)]
    cuts += [-1] * shape.stages
    ranks = tuple(tuple([first[kind] + stage for kind, stage, _ in own]) for own in found.ranks)
    offsets = [0, *itertools.accumulate(map(len, ranks))]
    order: list[int] = []  # places among the actions of all ranks, one rank behind the other
    for rank, begin, end in found.segments:
        order += range(offsets[rank] + begin, offsets[rank] + end)
    there = np.array(order, dtype=np.int64)
    numbers, slots, waits = (
        np.fromiter(itertools.chain.from_iterable(every), dtype=np.int64, count=offsets[-1])[there]
        for every in (ranks, found.numbers, found.waits)
    )
    doers = np.repeat(np.arange(shape.ranks), np.diff(offsets))[there]
    places = np.zeros(3 * shape.stages * shape.microbatches + 1, dtype=np.int64)
    places[slots] = np.arange(1, len(order) + 1)
    after = np.where(np.array(cuts)[numbers] >= 0, places[waits], 0)
    one, two, three = (tuple(own.tolist()) for own in (doers, numbers, after))
    return Steps(one, two, three, tuple(cuts), ranks, RankActions(ranks, shape.stages))
