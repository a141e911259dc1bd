"""Simulates one step of a schedule: time and memory of each rank, from the costs of the stages."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_dtensor.schedule.timetable import check_accepts, ordered
from meshwright_pipeline.planning.activation_memory import KINDS, MemoryPeak, RankActions

MOST_ACTIONS = 6000
"""Steps with more actions are extrapolated from two shorter ones."""


@dataclass(frozen=True)
class StageCosts:
    """The costs of one microbatch on each stage; () means zero.

    Args:
        forward, backward: seconds, with collectives.
        collectives: of `backward`, those of collectives. The first half of a split backward takes these and half of the rest.
        saved: bytes kept from the forward to the end of the backward; with () no memory is simulated.
        sending: seconds of a message over each boundary, one fewer than stages.
        over: peak bytes of the backward, beyond `saved`.
        first: the same for the first half of a split backward; () for `over`.
        deferred_bytes: bytes kept between the halves of a split backward.
        gradients: bytes of the parameter gradients, which exist from the end of the first backward on.
        split: False if the first half of a backward does all of it, as in stages that recompute.
        halving: seconds that each half of a split backward takes in addition.
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
    collectives: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """A simulated step.

    Attributes:
        seconds: from the start to the end of the last action.
        busy: for each rank, the seconds in which it computes (on shared cores: wall-clock seconds, without messages).
        held: for each rank, the largest bytes of activations held at once.
        fullest: for each rank, its memory peak.
        silent: the seconds if messages took no time.
    """

    seconds: float
    busy: tuple[float, ...]
    held: tuple[float, ...]
    fullest: tuple[MemoryPeak, ...] = ()
    silent: float = 0.0


def predict(
    schedule: Schedule, shape: Shape, costs: StageCosts, slowdown: tuple[float, ...] = ()
) -> Prediction:
    """Simulate a step.

    `slowdown`: for ranks that share cores, the factor on `costs` while 1, 2, ..., all ranks compute; () if each rank has
    its own device.

    Raises UsageError: the schedule refuses the pipeline, is incomplete, or would hang; `slowdown` has another length.
    """
    if slowdown and (len(slowdown) != shape.ranks or min(slowdown) <= 0):
        text = f"slowdown={slowdown}: expected one positive number for each of the {shape.ranks} ranks"
        raise UsageError(text)
    check_accepts(schedule, shape)
    shapes = simulated_shapes(shape)
    if len(shapes) == 1:
        return _simulate(schedule, shape, costs, slowdown)
    short, longer = (_simulate(schedule, simulated, costs, slowdown) for simulated in shapes)
    few, more = (simulated.microbatches for simulated in shapes)
    factor = (shape.microbatches - more) / (more - few)

    def extrapolated(a: float, b: float) -> float:
        return b + factor * (b - a)

    return Prediction(
        extrapolated(short.seconds, longer.seconds),
        tuple(map(extrapolated, short.busy, longer.busy)),
        tuple(map(extrapolated, short.held, longer.held)),
        tuple(
            MemoryPeak(*map(extrapolated, astuple(a), astuple(b)))
            for a, b in zip(short.fullest, longer.fullest, strict=True)
        ),
        extrapolated(short.silent, longer.silent),
    )


def simulated_shapes(shape: Shape) -> tuple[Shape, ...]:
    """The steps to simulate: the step itself, or two shorter ones to extrapolate its steady state from."""
    few, more = 2 * shape.stages, 3 * shape.stages
    # an extrapolation takes two simulations
    if 2 * shape.stages * shape.microbatches <= MOST_ACTIONS or shape.microbatches <= few + more:
        return (shape,)
    # a multiple of the number of stages consists of whole groups of microbatches in every schedule
    return tuple(Shape(shape.ranks, shape.stages, count) for count in (few, more))


@functools.lru_cache(maxsize=256)
def straggler_delay(schedule: Schedule, shape: Shape) -> tuple[float, float]:
    """How much of a delay of each rank the ranks wait: if the first microbatch is slower, and if all are slower.

    The delay is one forward time, for each forward and for each backward to inputs. The result is a property of the
    schedule, for equal stages whose backward takes twice as long as their forward.
    """
    short = simulated_shapes(shape)[0]
    steps, stages = steps_of(schedule, short), short.stages
    lengths = (*((1.0,) * stages), *((2.0,) * stages), *((1.0,) * (2 * stages)))
    plain, first, all_late = ([0.0] * shape.ranks for _ in range(3))
    ends: tuple[list[float], ...] = ([0.0], [0.0], [0.0])
    begun: set[int] = set()
    longer = 0
    for rank, number, place in zip(steps.ranks, steps.numbers, steps.after, strict=True):
        # forward, whole backward, or its first half
        counts = number < 3 * stages
        fresh = number not in begun and number < stages
        begun.add(number)
        longer += counts and rank == 0
        for clock, ended, more in zip((plain, first, all_late), ends, (0.0, fresh, counts), strict=True):
            clock[rank] = max(clock[rank], ended[place]) + lengths[number] + more
            ended.append(clock[rank])
    length = max(plain)
    of_first, of_all = (max(first) - length) / shape.each - 1.0, (max(all_late) - length) / longer - 1.0
    return max(0.0, of_first), max(0.0, of_all)


@functools.lru_cache(maxsize=256)
def input_gradient_share(schedule: Schedule, shape: Shape) -> float:
    """The fraction of the backward pass that runs before weight gradients; 1 if no backward is split."""
    short = simulated_shapes(shape)[0]
    kinds = [number // short.stages for number in steps_of(schedule, short).numbers]
    whole, halves = kinds.count(KINDS.index("B")), kinds.count(KINDS.index("I"))
    return (whole + halves / 2) / (whole + halves)


@dataclass(frozen=True)
class Steps:
    """A checked schedule as arrays. An action number is kind (index in KINDS) x stages + stage.

    Attributes:
        ranks, numbers, after: for each action, in topological order: its rank, its number, and the place (from 1 on) of the
            action on another rank that it waits for, 0 for none.
        cuts: by action number, the stage boundary of the message that the action waits for; -1 for none.
        by_rank: the action numbers of each rank.
        actions: the same, to compute memory.
    """

    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    after: tuple[int, ...]
    cuts: tuple[int, ...]
    by_rank: tuple[tuple[int, ...], ...]
    actions: RankActions


def _lengths(costs: StageCosts) -> tuple[float, ...]:
    """Seconds of an action, by action number."""
    stages = len(costs.forward)
    if not costs.split:
        return (*costs.forward, *costs.backward, *costs.backward, *((0.0,) * stages))
    zero = (0.0,) * stages
    collectives, halving = costs.collectives or zero, costs.halving or zero
    # weight gradients need no collectives
    weights = [
        (b - sent) / 2 + longer for b, sent, longer in zip(costs.backward, collectives, halving, strict=True)
    ]
    inputs = [half + sent for half, sent in zip(weights, collectives, strict=True)]
    return (*costs.forward, *costs.backward, *inputs, *weights)


def _simulate(schedule: Schedule, shape: Shape, costs: StageCosts, slowdown: tuple[float, ...]) -> Prediction:
    steps, lengths = steps_of(schedule, shape), _lengths(costs)
    # the last entry is for no message, -1
    sending = (*(costs.sending or (0.0,) * shape.stages), 0.0)
    late = [sending[cut] for cut in steps.cuts]
    held: tuple[float, ...] = (0.0,) * shape.ranks
    fullest: tuple[MemoryPeak, ...] = ()
    if costs.saved:
        zero = (0.0,) * shape.stages
        over, waiting, gradients = costs.over or zero, costs.deferred_bytes or zero, costs.gradients or zero
        first = costs.first or over
        held, fullest = steps.actions.held(costs.saved, over, waiting, gradients, costs.split, first)
    if slowdown:
        timed: list[list[TimedAction]] = [[] for _ in steps.by_rank]
        actions = zip(steps.ranks, steps.numbers, steps.after, strict=True)
        for place, (rank, number, after) in enumerate(actions, 1):
            timed[rank].append(TimedAction(place, lengths[number], after, late[number]))
        seconds, _ = shared_core_time(timed, slowdown)
        without_messages = [[replace(action, sending=0.0) for action in of_rank] for of_rank in timed]
        silent_seconds, computing = shared_core_time(without_messages, slowdown)
        return Prediction(seconds, tuple(computing), held, fullest, silent_seconds)
    clock, silent = ([0.0] * shape.ranks for _ in range(2))
    # ends of actions, with messages and if they took no time; place 0 stands for no action
    ends, silent_ends = [0.0], [0.0]
    action_seconds, delays = (map(table.__getitem__, steps.numbers) for table in (lengths, late))
    for rank, length, place, delay in zip(steps.ranks, action_seconds, steps.after, delays, strict=True):
        start, arrival = clock[rank], ends[place] + delay
        if arrival > start:
            start = arrival
        clock[rank] = end = start + length
        ends.append(end)
        start, arrival = silent[rank], silent_ends[place]
        if arrival > start:
            start = arrival
        silent[rank] = end = start + length
        silent_ends.append(end)
    busy = tuple(sum(map(lengths.__getitem__, numbers), 0.0) for numbers in steps.by_rank)
    return Prediction(max(clock), busy, held, fullest, max(silent))


@functools.lru_cache(maxsize=256)
def steps_of(schedule: Schedule, shape: Shape) -> Steps:
    """The arrays of a checked schedule; cached, since a search asks for the same ones many times."""
    order = ordered(schedule, shape)
    owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
    first = {kind: number * shape.stages for number, kind in enumerate(KINDS)}
    # activations come from the previous stage, gradients from the next one
    from_previous = [stage > 0 and owners[stage - 1] != rank for stage, rank in enumerate(owners)]
    from_next = [*from_previous[1:], False]
    cuts = [stage - 1 if waits else -1 for stage, waits in enumerate(from_previous)]
    cuts += [stage if waits else -1 for _ in "BI" for stage, waits in enumerate(from_next)]
    cuts += [-1] * shape.stages
    by_rank = tuple(tuple([first[kind] + stage for kind, stage, _ in actions]) for actions in order.ranks)
    offsets = [0, *itertools.accumulate(map(len, by_rank))]
    # indices into the actions of all ranks, concatenated by rank
    indices: list[int] = []
    for rank, begin, end in order.segments:
        indices += range(offsets[rank] + begin, offsets[rank] + end)
    sorting = np.array(indices, dtype=np.int64)
    numbers, slots, waits = (
        np.fromiter(itertools.chain.from_iterable(values), dtype=np.int64, count=offsets[-1])[sorting]
        for values in (by_rank, order.numbers, order.waits)
    )
    ranks = np.repeat(np.arange(shape.ranks), np.diff(offsets))[sorting]
    places = np.zeros(3 * shape.stages * shape.microbatches + 1, dtype=np.int64)
    places[slots] = np.arange(1, len(indices) + 1)
    after = np.where(np.array(cuts)[numbers] >= 0, places[waits], 0)
    rank_of, number_of, after_of = (tuple(array.tolist()) for array in (ranks, numbers, after))
    return Steps(rank_of, number_of, after_of, tuple(cuts), by_rank, RankActions(by_rank, shape.stages))


# ---- ranks that share CPU cores (processor sharing): a rank that waits leaves its core to the others
@dataclass(frozen=True)
class TimedAction:
    """An action of a rank.

    Attributes:
        place: its number, from 1 on.
        seconds: compute time while all ranks compute.
        after: number of the action that it waits for, 0 for none.
        sending: seconds from the end of that action until its message has arrived.
    """

    place: int
    seconds: float
    after: int
    sending: float


def shared_core_time(
    ranks: Sequence[Sequence[TimedAction]], slowdown: Sequence[float]
) -> tuple[float, list[float]]:
    """Seconds until all ranks have run their actions in order, and the seconds for which each rank computes.

    Between two events all computing ranks run at the same pace: while n ranks compute, an action takes
    `slowdown[n - 1]` times its `seconds`.

    Raises ValueError: the actions wait for each other, or a time is not finite.
    """
    if not all(math.isfinite(a.seconds) and math.isfinite(a.sending) for actions in ranks for a in actions):
        raise ValueError("every action, and every message, must take a finite time")
    now, busy = 0.0, [0.0] * len(ranks)
    # number of a finished action -> its end
    ends = {0: 0.0}
    queues = [iter(actions) for actions in ranks]
    following = [next(queue, None) for queue in queues]
    # computing rank -> seconds left, if all ranks computed
    remaining: dict[int, float] = {}
    while True:
        # start each action whose inputs are there, and find when the next input arrives
        arrival = math.inf
        for rank, action in enumerate(following):
            if action is None or rank in remaining or action.after not in ends:
                continue
            ready = ends[action.after] + action.sending if action.after else now
            if ready <= now:
                remaining[rank] = action.seconds
            else:
                arrival = min(arrival, ready)
        if not remaining and arrival == math.inf:
            if any(following):
                raise ValueError("the actions wait for each other")
            return now, busy
        # go on to the next event: an action ends, or a message arrives
        pace = slowdown[len(remaining) - 1]
        nearest = min(remaining, key=remaining.__getitem__, default=-1)
        length = remaining.get(nearest, math.inf) * pace
        step = min(length, arrival - now)
        for rank in remaining:
            remaining[rank] = max(0.0, remaining[rank] - step / pace)
            busy[rank] += step
        if length > step:
            now = arrival
            continue
        # other actions that end now follow in steps of length zero
        now += step
        action = following[nearest]
        assert action is not None
        ends[action.place], following[nearest] = now, next(queues[nearest], None)
        del remaining[nearest]
