"""`meshwright plugins`: what is installed, by which distribution and version, and what is broken and why."""

from __future__ import annotations

import json

import click

from meshwright.cli import State
from meshwright.rendering.tables import show
from meshwright_dtensor.utils.console import Table


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(state: State, as_json: bool) -> None:
    """List the installed plugins and the problems of those that were left out."""
    host = state.host
    rows = [
        {
            "kind": entry.record.kind,
            "name": entry.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "entry_point": entry.entry_point,
            "target": entry.record.target,
            "summary": entry.record.summary,
        }
        for entry in host.everything()
    ]
    problems = [
        {
            "distribution": problem.distribution,
            "version": problem.version,
            "entry_point": problem.entry_point,
            "reason": problem.reason,
        }
        for problem in host.problems
    ]
    if as_json:
        click.echo(
            json.dumps({"plugins": rows, "problems": problems, "disabled": list(host.disabled)}, indent=2)
        )
        return
    table = Table(box=None, pad_edge=False)
    for title in ("kind", "name", "distribution", "version", "summary"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(row[key] for key in ("kind", "name", "distribution", "version", "summary")))
    console = show(table)
    for name in host.disabled:
        console.print(f"turned off: {name}", highlight=False)
    for problem in host.problems:
        console.print(f"[red]left out:[/red] {problem}", highlight=False, soft_wrap=True)
