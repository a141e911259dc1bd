"""Sequence parallelism that is asked for: which degrees can do it, and what to say where none can."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshwright_planner.placing.legal import balanced

if TYPE_CHECKING:
    from meshwright_planner.search.setting import Setting


def divides(setting: Setting, degree: int, lengths: Iterable[int]) -> bool:
    """Whether a searched axis of this degree can split sequences of these lengths (a rank's), if that is asked for."""
    if not setting.sequence_parallel or setting.world_size == 1:
        return True
    return degree > 1 and all(balanced(length, degree) for length in lengths)


def needs(setting: Setting) -> str:
    """What to add to an error when it is asked for; else nothing."""
    if not setting.sequence_parallel:
        return ""
    length = setting.batch.sequence_length
    shown = "the sequence, and the batch has none" if length is None else f"the sequence ({length} tokens)"
    return (
        f"; sequence_parallel=True needs a tensor axis of a degree above 1 that divides {shown}: "
        "do not pin that axis to 1, pad the batch, or leave sequence_parallel out"
    )
