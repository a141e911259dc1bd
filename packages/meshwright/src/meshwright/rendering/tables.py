"""Tables as wide as the terminal, and as wide as they need where there is none: a pipe or a file cuts nothing off."""

from __future__ import annotations

from meshwright_dtensor.utils.console import Console, Measurement, Table

MOST_WIDTH = 10_000


def show(table: Table) -> Console:
    """Print a table on stdout; the console that it was printed on, for what follows."""
    console = Console()
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=MOST_WIDTH), table).maximum
        console.width = max(console.width, needed)
    console.print(table)
    return console
