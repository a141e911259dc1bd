"""What the compiled regions of a model have done: a table for `doctor` and for users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from meshwright_dtensor.utils.html import table_html
from meshwright_parallel.compile.install import regions_of

COLUMNS = ("module", "modules", "graphs", "compiled calls", "other calls", "why not compiled")


@dataclass(frozen=True)
class RegionRow:
    """The regions of one structure.

    Attributes:
        module: name of the first of them; modules: how many there are.
        graphs: compilations that were tried.
        compiled, other: calls that ran compiled, and as they are.
        reasons: why calls ran as they are, the most frequent first, with how many did.
    """

    module: str
    modules: int
    graphs: int
    compiled: int
    other: int
    reasons: tuple[tuple[str, int], ...]


class Regions:
    """The compiled regions of a model, as `rows`, as text and as HTML."""

    def __init__(self, rows: list[RegionRow]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        from meshwright_dtensor.utils.console import as_text, full_width, table_of

        if not self.rows:
            return "no compiled regions: the plan names none (compile=True)\n"
        table = table_of(COLUMNS, self._cells(), right=COLUMNS[1:5])
        return as_text([table], full_width(table))

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return table_html(COLUMNS, self._cells(), right=COLUMNS[1:5])

    def _cells(self) -> Iterator[tuple[object, ...]]:
        for row in self.rows:
            why = "; ".join(f"{reason} ({count})" for reason, count in row.reasons)
            yield row.module, row.modules, row.graphs, row.compiled, row.other, why


def regions(model: nn.Module) -> Regions:
    """The compiled regions of a parallel model on this rank, and why calls of them ran as they are.

    A module inside of a region is listed where the region could not be compiled as a whole.
    """
    kinds: dict[int, tuple[str, list[str]]] = {}
    of_names = {name: region for name, region in regions_of(model).items() if region.active}
    for name, region in of_names.items():
        kinds.setdefault(id(region.kind), (name, []))[1].append(name)
    rows = []
    for first, names in kinds.values():
        kind = of_names[first].kind
        reasons = sorted(kind.reasons.items(), key=lambda item: -item[1])
        rows.append(RegionRow(first, len(names), kind.compiled, kind.runs, kind.others, tuple(reasons)))
    return Regions(rows)
