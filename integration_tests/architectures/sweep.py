"""Run architectures in every layout, on reused ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .attempts import attempts
from .catalogue import Architecture
from .judge import Verdict
from .layouts import LAYOUTS
from .tiny import Tiny

RENEWED = 40


@dataclass
class Row:
    """One line of the table: verdicts by layout, or why there are none."""

    architecture: Architecture
    unbuildable: str = ""
    verdicts: dict[str, Verdict] = field(default_factory=dict)


def sweep(architectures: Sequence[Architecture], layouts: Sequence[str]) -> Iterator[Row]:
    """Rows in the order of `architectures`; whatever goes wrong is in the row."""
    chosen = {name: LAYOUTS[name] for name in layouts}
    results = attempts([Tiny(each) for each in architectures], chosen, RENEWED)
    for architecture, result in zip(architectures, results, strict=True):
        unbuildable = result if isinstance(result, str) else ""
        yield Row(architecture, unbuildable, {} if isinstance(result, str) else result)
