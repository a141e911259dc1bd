"""Small pieces of HTML for notebooks: tables, text, and what can be opened. They load nothing and keep the colours of the page."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable

_CELL = "padding:.15em .9em .15em 0;border-bottom:1px solid #8886;vertical-align:top"


def table_html(
    columns: Iterable[object],
    rows: Iterable[Iterable[object]],
    *,
    title: str = "",
    right: Collection[str] = (),
) -> str:
    """A table; columns in `right` are aligned to the right. It scrolls by itself where the page is too narrow."""
    names = [str(column) for column in columns]
    sides = ["right" if name in right else "left" for name in names]

    def row(cells: Iterable[object], tag: str) -> str:
        return "".join(
            f'<{tag} style="text-align:{side};{_CELL}">{html.escape(str(cell))}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    head = f"<p>{html.escape(title)}</p>" if title else ""
    style = "border-collapse:collapse;background:transparent;font-variant-numeric:tabular-nums"
    return (
        f'{head}<div style="overflow-x:auto"><table style="{style}">'
        f"<thead><tr>{row(names, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def text_html(text: str) -> str:
    """Text as it is, with its line breaks. It scrolls by itself where the page is too narrow."""
    return f'<pre style="overflow-x:auto;line-height:1.25">{html.escape(text)}</pre>'


def details_html(summary: str, inside: str) -> str:
    """A line that opens `inside`, which is HTML."""
    return f"<details><summary>{html.escape(summary)}</summary>{inside}</details>"
