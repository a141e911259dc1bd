"""Cost of a loss on the full batch: all forwards, then the code after the last unit (the tail), then all backwards.

This mode runs if a loss is not additive over microbatches (see runtime.full_batch_tail).
"""

from __future__ import annotations

from dataclasses import replace

from meshwright_dtensor.utils.memo import Memo
from meshwright_pipeline.planning.activation_memory import MemoryPeak
from meshwright_pipeline.planning.simulate import Prediction
from meshwright_pipeline.planning.unit_costs import NO_WORK, ModelCosts, UnitWork


def without_tail(model: ModelCosts) -> ModelCosts:
    """The costs without the work after the last unit, cached."""
    return model.memo.once("without tail", lambda: replace(model, tail=NO_WORK, memo=Memo()))


def tail_of(model: ModelCosts) -> UnitWork:
    """The tail of a microbatch. It includes the code between units, which runs again before it."""
    return model.tail.after(model.between)


def tail_memory(tail: UnitWork, microbatches: int) -> tuple[float, float, float]:
    """Bytes kept while a tail runs, bytes alive in addition, and bytes of the gradients from the tail to the units.

    Unit results of the microbatches are concatenated, so they exist twice; and so do their gradients, which exist for all
    microbatches when backwards begin.
    """
    inputs = microbatches * sum(size for _, _, size in tail.inputs)
    return microbatches * tail.kept + inputs, microbatches * tail.over + inputs, inputs


def with_tail(step: Prediction, tail: UnitWork, rank: int, microbatches: int) -> Prediction:
    """A step with the tail between its forwards and backwards, on the rank of the last stage."""
    seconds = microbatches * tail.seconds
    kept, over, gradients = tail_memory(tail, microbatches)
    busy, held, fullest = list(step.busy), list(step.held), list(step.fullest)
    busy[rank] += seconds
    if fullest:
        units = held[rank]
        held[rank] = units + kept
        whole = MemoryPeak(held[rank], over)
        backward = replace(fullest[rank], over=fullest[rank].over + gradients)
        fullest[rank] = max(backward, whole, key=lambda peak: peak.total)
    step = replace(step, seconds=step.seconds + seconds, silent=step.silent + seconds)
    return replace(step, busy=tuple(busy), held=tuple(held), fullest=tuple(fullest))
