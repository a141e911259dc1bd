"""Judges the losses of a run: which are none to train on, and how often in a row."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import torch.distributed as dist

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import extremes
from meshwright_dtensor.utils.names import count_of

WINDOW, FEWEST = 50, 10
"""Losses of which the median is taken, and how many it takes."""


class LossGuard:
    """The losses of a run.

    Args:
        spike: a loss above so many times the median of the last ones is none to train on; None: no such.
        most: faults that may follow each other without a new checkpoint.
    """

    def __init__(self, spike: float | None, most: int) -> None:
        if spike is not None and not spike > 1:
            raise UsageError(
                f"spike={spike!r} is no multiple of a loss that is too large; pass a number above 1, or None"
            )
        if type(most) is not int or most < 0:
            raise UsageError(f"rewinds={most!r} is no number of times; pass 0 or more")
        self.spike, self.most = spike, most
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._faults = 0

    @property
    def last(self) -> list[float]:
        """The losses of which the median is taken, which a run that is started again needs; none without `spike`."""
        return [] if self.spike is None else list(self._last)

    @last.setter
    def last(self, losses: Iterable[float]) -> None:
        self._last = deque(losses, maxlen=WINDOW)

    def fault_of(self, loss: float) -> str:
        """What is wrong with a loss; "" if nothing is."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if self.spike is not None and len(self._last) >= FEWEST:
            median = statistics.median(self._last)
            if loss > self.spike * median > 0:
                return f"the loss is {loss:.6g}, {loss / median:.3g} times the median of the last {len(self._last)}"
        self._last.append(loss)
        return ""

    def count(self, fault: str) -> None:
        """Count a fault. Raises FloatingPointError: there were too many."""
        self._faults += 1
        if self._faults > self.most:
            raise FloatingPointError(
                f"{fault}; the run went back {count_of(self.most, 'time')} before, and came to no new checkpoint: look at "
                "these batches, or use a smaller learning rate"
            )

    def forgive(self) -> None:
        """A new checkpoint is reached."""
        self._faults = 0


def fault_on_all(fault: str) -> str:
    """The fault of this rank, or else that another one has one; "" if no rank has (a collective call of all ranks)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return fault
    ((_, most),) = extremes([int(bool(fault))], None)
    return fault or ("the loss of another rank is none to train on" if most else "")
