"""Numbers of one device on CPUs: all of them are drawn, in pieces, and those of other ranks are dropped."""

from __future__ import annotations

from dataclasses import replace

from meshwright_dtensor.drawing.held import Held, Target
from meshwright_dtensor.drawing.whole import Way, Whole, agrees

_BLOCK = 16
_TRIAL = (1027, 3)
_TRIAL_PIECE = 1024


def in_sequence(whole: Whole, held: Held, target: Target) -> None:
    """Draw along memory, piece after piece."""
    buffer = whole.buffer(whole.piece + _BLOCK)
    drawn, total = 0, held.total
    while drawn < total:
        left = total - drawn
        # the last piece is never shorter than a block
        count = left if left < whole.piece + _BLOCK else whole.piece
        piece = buffer[:count]
        whole.draw(piece)
        held.put(target, piece, drawn)
        drawn += count


def chosen(whole: Whole) -> Way | None:
    """A way that gives the numbers of one device; None if no one does, which depends on op, build and processor."""
    few = replace(whole, piece=_TRIAL_PIECE)
    return in_sequence if agrees(in_sequence, few, *_TRIAL) else None
