"""Warns once when a first step finds that the schedule cannot be followed, and more memory is held than planned."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from meshwright_dtensor.plan import PipelineRule, Prediction
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_pipeline.analysis.loss_additivity import INPUT_GRADIENT, NO_LOSS, ROWS_LEFT, Reason


@dataclass
class ScheduleWarning:
    """Warns that the backwards start after all forwards, unlike planned by `rule` and `table`.

    `predicted`: by the plan; None where it predicts nothing. `quiet`: another rank warns.
    """

    rule: PipelineRule
    table: Timetable
    predicted: Prediction | None
    quiet: bool = False
    _warned: set[str] = field(default_factory=set)

    def warn(self, why: Reason) -> None:
        """Warn once for each hook that is the cause, and once for all other causes.

        No warning where the plan already counts on it (except for hooks), or where the schedule would hold as much.
        """
        shape = self.table.shape
        held, planned = shape.microbatches * shape.each, max(self.table.alive)
        expected = self.rule.loss == "batch" and not why.hook
        if self.quiet or expected or planned >= held or why.hook in self._warned:
            return
        self._warned.add(why.hook)
        warnings.warn(
            f"the schedule {self.rule.schedule!r} of this pipeline is lost: no backward starts before the last forward has ended. "
            f"A rank holds the activations of {held} microbatches, as under gpipe, where the schedule would hold "
            f"{planned}{self._peak(held / planned)}. Why: {_cause(why)}",
            stacklevel=5,
        )

    def _peak(self, factor: float) -> str:
        """What becomes of the predicted peak."""
        if self.predicted is None or self.rule.loss == "batch":
            return ""
        memory = self.predicted.memory_bytes
        if not memory.get("activations"):
            return ""
        peak = self.predicted.total_bytes + (factor - 1) * memory["activations"]
        limit = self.predicted.limit_bytes
        of = f", of the {human_bytes(limit)} that a rank has" if limit else ""
        planned = human_bytes(self.predicted.total_bytes)
        return f"; the peak that the plan predicts, {planned}, becomes about {human_bytes(peak)}{of}"


def _cause(why: Reason) -> str:
    """The reason and its fix."""
    if why.hook and not why.reads:
        return (
            f"{why}; the loss is computed after the pipeline. Have the hook only keep tensors, or remove it"
        )
    if why.hook:
        return (
            f"the forward {why.hook} reads values of its tensors. On one device they hold the whole batch, in a pipeline one "
            "microbatch: the loss is computed after the pipeline. Have the hook keep tensors and read them after the step, or "
            "remove it"
        )
    if why == NO_LOSS:
        return f"{why}. Return the loss from the model, so that backwards start earlier"
    if why == ROWS_LEFT:
        return f"{why}. Batches whose rows they share equally keep the schedule (drop_last=True of a loader leaves the rest out)"
    if why == INPUT_GRADIENT:
        return f"{why}. Where it is not needed, give the model tensors without one (x.detach())"
    return (
        f"the loss is not proven to add up over microbatches ({why}), so it is computed on the whole batch. Compute it as sums or "
        "means over rows, so that backwards start earlier"
    )
