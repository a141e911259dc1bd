"""`meshwright plugins`: what is installed, by which distribution and version, and what is broken and why."""

from __future__ import annotations

import json

import click

from meshwright.cli import State
from meshwright_dtensor.utils.console import show, table_of

ORIGIN = ("distribution", "version", "entry_point")
"""Where a plugin or a problem comes from."""


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(state: State, as_json: bool) -> None:
    """List the installed plugins and the problems of those that were left out."""
    host = state.host
    rows = []
    for entry in host.everything():
        record, origin = entry.record, {name: getattr(entry, name) for name in ORIGIN}
        row = {"kind": record.kind, "name": entry.name, **origin}
        rows.append({**row, "target": record.target, "summary": record.summary})
    problems = [{name: getattr(problem, name) for name in (*ORIGIN, "reason")} for problem in host.problems]
    if as_json:
        data = {"plugins": rows, "problems": problems, "disabled": list(host.disabled)}
        click.echo(json.dumps(data, indent=2))
        return
    titles = ("kind", "name", "distribution", "version", "summary")
    console = show(table_of(titles, ([row[title] for title in titles] for row in rows)))
    for name in host.disabled:
        console.print(f"turned off: {name}", highlight=False)
    for problem in host.problems:
        console.print(f"[red]left out:[/red] {problem}", highlight=False, soft_wrap=True)
