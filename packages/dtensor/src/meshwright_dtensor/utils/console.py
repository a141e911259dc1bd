"""Reports as text, and the names of rich that they use, imported without a draw from Python's random numbers.

rich.style draws from `random` when it is first imported. A report in the middle of a run would then change the numbers
that the user's script draws afterwards, and on the reporting rank alone.
"""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterable
from typing import Literal

_state = random.getstate()

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.measure import Measurement  # noqa: E402
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_state)

__all__ = [
    "Console",
    "Progress",
    "SpinnerColumn",
    "Table",
    "TextColumn",
    "TimeElapsedColumn",
    "as_text",
    "full_width",
    "show",
    "table_of",
]


def table_of(columns: Iterable[str], rows: Iterable[Iterable[object]], right: Collection[str] = ()) -> Table:
    """A table with these titles; brackets are text, not markup. Columns in `right` are aligned to the right, in one line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(Text(column), justify=justify, no_wrap=column in right, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def as_text(items: Iterable[str | Table], width: int) -> str:
    """Lines and tables, `width` columns wide, without colors."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, _environ={})
    for item in items:
        console.print(Text(item) if isinstance(item, str) else item)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def full_width(table: Table) -> int:
    """The columns with which no cell of the table is cut off."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def show(table: Table) -> Console:
    """Print a table on stdout, and uncut where that is no terminal; the console that it was printed on, for what follows."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, full_width(table))
    console.print(table)
    return console
