"""Steps in which no backward begins before the last forward has ended: what runs where a loss does not add up.

The code behind the last unit then runs once, on the whole batch, between the forwards and the backwards (see tail).
"""

from __future__ import annotations

from dataclasses import replace

from meshwright_pipeline.planning.activation_memory import MemoryPeak
from meshwright_pipeline.planning.simulate import Prediction
from meshwright_pipeline.planning.unit_costs import NO_WORK, ModelCosts, UnitWork


def without_tail(found: ModelCosts) -> ModelCosts:
    """The same work, but for what lies behind the last unit; made once."""
    bare: ModelCosts = found.once("without tail", lambda: replace(found, tail=NO_WORK, found={}))
    return bare


def tail_of(found: ModelCosts) -> UnitWork:
    """What lies behind the last unit, with the code between units, which runs anew before it; of a microbatch."""
    early = sum(run.forward for run in found.between)
    return replace(found.tail, seconds=found.tail.seconds + early, forward=found.tail.forward + early)


def tail_gradient_bytes(tail: UnitWork, microbatches: int) -> float:
    """Bytes of the gradients that a tail hands to the units: those of all microbatches are there when backwards begin."""
    return microbatches * sum(size for _, _, size in tail.inputs)


def tail_memory(tail: UnitWork, microbatches: int) -> tuple[float, float]:
    """Bytes that are kept for a tail while it runs, of what it takes too, and that are alive beside.

    What it takes of the units it takes as one, beside the parts, and gives back their gradients part by part, beside that of the
    whole.
    """
    taken = tail_gradient_bytes(tail, microbatches)
    return microbatches * tail.kept + taken, microbatches * tail.over + taken


def with_tail(step: Prediction, tail: UnitWork, rank: int, microbatches: int) -> Prediction:
    """A step with the code behind the last unit between its forwards and backwards, on the rank of the last stage.

    What it takes comes to what the units of all microbatches keep; the gradients of that lie beside backwards.
    """
    seconds = microbatches * tail.seconds
    kept, over = tail_memory(tail, microbatches)
    busy, held, fullest = list(step.busy), list(step.held), list(step.fullest)
    busy[rank] += seconds
    if fullest:
        units = held[rank]
        held[rank] = units + kept
        whole = MemoryPeak(held[rank], over)
        backward = replace(fullest[rank], over=fullest[rank].over + tail_gradient_bytes(tail, microbatches))
        fullest[rank] = max(backward, whole, key=lambda one: one.total)
    return replace(
        step,
        seconds=step.seconds + seconds,
        silent=step.silent + seconds,
        busy=tuple(busy),
        held=tuple(held),
        fullest=tuple(fullest),
    )
