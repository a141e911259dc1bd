"""Draws a layout: which rank holds which part of a global value, as a grid of text or HTML."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.sharding.boxes import Region, region_of
from meshwright_dtensor.sharding.states import States, format_state
from meshwright_dtensor.utils.console import Table, as_text, table_of
from meshwright_dtensor.utils.html import table_html
from meshwright_dtensor.utils.names import number_ranges

MOST_CELLS = 32
"""Parts of a dim that are drawn; the rest are counted."""


class Layout(Protocol):
    """What a drawing reads of a layout (`mesh.layout.Layout`)."""

    context: MeshContext
    states: States
    shape: torch.Size
    dtype: torch.dtype

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh."""


def layout_title(layout: Layout) -> str:
    """Shape, dtype, mesh and states of a layout in a line."""
    context = layout.context
    mesh = " x ".join(f"{axis} {n}" for axis, n in zip(context.axes, context.sizes, strict=True))
    states = ", ".join(f"{a}={format_state(s)}" for a, s in zip(context.axes, layout.states, strict=True))
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{list(layout.shape)} {dtype} on {mesh}: {states}"


def layout_text(layout: Layout) -> str:
    """The grid as text."""
    columns, rows, notes = _grid(layout)
    items: list[str | Table] = [layout_title(layout), table_of(columns, rows), *notes]
    return as_text(items, 160)


def layout_html(layout: Layout) -> str:
    """The grid as HTML, for a notebook."""
    columns, rows, notes = _grid(layout)
    return table_html(columns, rows, title=layout_title(layout)) + "".join(f"<p>{note}</p>" for note in notes)


def _grid(layout: Layout) -> tuple[list[str], list[list[str]], list[str]]:
    """Titles of columns, rows, and notes. Rows are parts of the first sharded dim, columns of the second one."""
    held = dict(_regions(layout))
    dims = sorted({int(state) for state in layout.states if isinstance(state, int)})
    down, across = (*dims, None, None)[:2]
    downs, acrosses = (_pieces(held, dim) for dim in (down, across))
    rows = []
    for piece in downs[:MOST_CELLS]:
        cells = []
        for other in acrosses[:MOST_CELLS]:
            ranks = [
                r for r, region in held.items() if _has(region, down, piece) and _has(region, across, other)
            ]
            cells.append(f"rank{'' if len(ranks) == 1 else 's'} {number_ranges(ranks)}")
        rows.append([_named(piece), *cells])
    columns = ["all" if down is None else f"dim {down}", *(_titles(across, acrosses[:MOST_CELLS]))]
    notes = []
    if any(state == "P" for state in layout.states):
        axes = [a for a, s in zip(layout.context.axes, layout.states, strict=True) if s == "P"]
        notes.append(f"The value is the sum of what the ranks along {', '.join(axes)} hold.")
    if dims[2:]:
        notes.append(f"Also sharded, and not drawn: {', '.join(f'dim {dim}' for dim in dims[2:])}.")
    left = max(0, len(downs) - MOST_CELLS) + max(0, len(acrosses) - MOST_CELLS)
    if left:
        notes.append(f"{left} more parts are not drawn.")
    return columns, rows, notes


def _regions(layout: Layout) -> Iterator[tuple[int, Region]]:
    """(rank, the region that it holds), for every rank of the mesh."""
    context, ranks = layout.context, layout.mesh.mesh
    for coords in itertools.product(*map(range, context.sizes)):
        yield int(ranks[coords]), region_of(tuple(layout.shape), context.sizes, coords, layout.states)


def _pieces(held: dict[int, Region], dim: int | None) -> list[tuple[int, int]]:
    """The (first, last + 1) of the parts that some rank holds of a dim, in order. Parts of no elements are left out."""
    if dim is None:
        return [(0, 0)]
    edges = {
        edge for region in held.values() for start, length in region[dim] for edge in (start, start + length)
    }
    return list(itertools.pairwise(sorted(edges)))


def _has(region: Region, dim: int | None, piece: tuple[int, int]) -> bool:
    if dim is None:
        return True
    return any(start <= piece[0] and piece[1] <= start + length for start, length in region[dim])


def _named(piece: tuple[int, int]) -> str:
    first, end = piece
    return "" if end <= first else str(first) if end == first + 1 else f"{first}-{end - 1}"


def _titles(dim: int | None, pieces: list[tuple[int, int]]) -> list[str]:
    return ["held by"] if dim is None else [f"dim {dim}: {_named(piece)}" for piece in pieces]
