"""What is drawn: the whole tensor as one device has it, and a trial whether another way to draw it gives its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from meshwright_dtensor.drawing.held import Held, Target

Tensor = torch.Tensor
Draw = Callable[[Tensor], Any]
"""Fills a tensor in place, element by element, and advances the generator."""

PIECE_NUMEL = 1 << 20
"""Elements drawn at a time: a multiple of 16, torch's block of normal numbers. With temporary values well below 64 MiB."""


@dataclass(frozen=True)
class Kind:
    """What a draw does, for ways that depend on it: the name of its operation, and its scalars."""

    name: str
    scalars: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Whole:
    """A tensor that one device fills.

    Attributes:
        draw: fills it.
        contiguous: in the order of its dims; CPUs then draw some distributions in another way.
        gaps: every second element in memory is its own.
        generator: that `draw` uses.
        piece: elements that are drawn at a time.
        kind: what `draw` does, if it is known.
    """

    draw: Draw
    dtype: torch.dtype
    device: torch.device
    contiguous: bool
    gaps: bool
    generator: torch.Generator
    piece: int = PIECE_NUMEL
    kind: Kind | None = None

    def buffer(self, count: int) -> Tensor:
        """`count` elements in a row, that torch takes for a part of such a tensor."""
        step = 1 if self.contiguous else 2
        return torch.empty(count * step, dtype=self.dtype, device=self.device)[::step]


Way: TypeAlias = Callable[[Whole, Held, Target], None]
"""Draws the part that a rank holds; the generator ends where one device leaves it."""


@contextmanager
def restored(generator: torch.Generator) -> Iterator[Tensor]:
    """Inside, the generator may be used; afterwards it is in its present state, which is given."""
    state = generator.get_state()
    try:
        yield state
    finally:
        generator.set_state(state)


def agrees(way: Way, whole: Whole, rows: int, columns: int) -> bool:
    """Whether `way` gives the numbers and the final state of one device, tried on `rows` x `columns`."""
    step = 2 if whole.gaps else 1
    memory = torch.empty(rows * columns * step, dtype=whole.dtype, device=whole.device)[::step].view(
        rows, columns
    )
    held = Held((rows, columns), ((((0, rows), (0, columns)),) * 2,))
    got = torch.empty(rows, columns, dtype=whole.dtype, device=whole.device)
    with restored(whole.generator) as state:
        whole.draw(memory if whole.contiguous else memory.t())
        end = whole.generator.get_state()
        whole.generator.set_state(state)
        way(whole, held, Target((got,)))
        return torch.equal(memory, got) and torch.equal(end, whole.generator.get_state())
