"""What a first step finds out that costs a pipeline its schedule is said, once: memory is held that the plan did not count."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from meshwright_dtensor.plan import PipelineRule, Prediction
from meshwright_dtensor.schedule.schedule import Shape
from meshwright_dtensor.schedule.timetable import Timetable
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_pipeline.analysis.loss_additivity import INPUT_GRADIENT, NO_LOSS, Reason


@dataclass
class Surprise:
    """Says it.

    Args:
        rule: what was planned.
        table, shape: the schedule that was asked for.
        predicted: of the plan, None where it says nothing.
        quiet: another rank says it.
    """

    rule: PipelineRule
    table: Timetable
    shape: Shape
    predicted: Prediction | None
    quiet: bool = False
    _told: set[str] = field(default_factory=set)

    def tell(self, why: Reason) -> None:
        """Warn that backwards begin behind all forwards; once for each hook that is to blame, and once where none is.

        Says nothing where the plan knows it, but for hooks, nor where the schedule would hold as much.
        """
        every, own = self.shape.microbatches * self.shape.each, max(self.table.alive)
        known = self.rule.loss == "batch" and not why.hook
        if self.quiet or known or own >= every or why.hook in self._told:
            return
        self._told.add(why.hook)
        if why.hook and not why.reads:
            cause = f"{why}; the loss is made behind the pipeline. Have the hook do nothing but keep tensors, or take it off"
        elif why.hook:
            cause = (
                f"the forward {why.hook} reads values of what it is given, which one device has of the whole batch and a "
                "pipeline of a microbatch: the loss is made behind the pipeline. Have the hook keep tensors and read them "
                "after the step, or take it off"
            )
        elif why == NO_LOSS:
            cause = f"{why}. Return the loss from the model for backwards to begin earlier"
        elif why == INPUT_GRADIENT:
            cause = f"{why}. Where it is not needed, give the model tensors without one (x.detach())"
        else:
            cause = (
                f"the loss is not proven to add up over microbatches ({why}), so that it is made of the whole batch. "
                "Compute it as sums or means over rows for backwards to begin earlier"
            )
        warnings.warn(
            f"the schedule {self.rule.schedule!r} of this pipeline is lost: no backward begins before the last forward has ended. "
            f"A rank holds the activations of {every} microbatches, as under gpipe, where the schedule would hold "
            f"{own}{self._peak(every / own)}. Why: {cause}",
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
