"""The names of rich that reports use, imported without a draw from Python's random numbers, and tables in full width.

rich.style draws from `random` when it is first imported. A report in the middle of a run would then change the numbers
that the user's script draws afterwards, and on the reporting rank alone.
"""

from __future__ import annotations

import random

_state = random.getstate()

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.measure import Measurement  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_state)

__all__ = ["Console", "Table", "Text", "box", "full_width", "show"]


def full_width(table: Table, console: Console) -> int:
    """The columns with which no cell of the table is cut off."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def show(table: Table) -> Console:
    """Print a table on stdout, and uncut where that is no terminal; the console that it was printed on, for what follows."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, full_width(table, console))
    console.print(table)
    return console
