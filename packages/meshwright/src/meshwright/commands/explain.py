"""`meshwright explain`: a plan file for people, or how two plan files differ."""

from __future__ import annotations

import json
from pathlib import Path

import click

from meshwright.cli import State
from meshwright_dtensor.plan import ParallelPlan


@click.command("explain")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--diff", "other", type=click.Path(path_type=Path), default=None, help="Say what changes to this plan."
)
@click.option("--world-size", type=int, default=None, help="Also check that the plan fits this many ranks.")
@click.option("--schedule", is_flag=True, help="Draw the timeline of the pipeline's schedule.")
@click.option("--png", type=click.Path(path_type=Path), default=None, help="Draw it into this file too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    state: State,
    plan: Path,
    other: Path | None,
    world_size: int | None,
    schedule: bool,
    png: Path | None,
    as_json: bool,
) -> None:
    """Say what a plan does and why; check it without taking any memory."""
    loaded = ParallelPlan.load(plan)
    loaded.validate_for(world_size, axes={found.record.axis for found in state.host.strategies().values()})
    if other is not None:
        changes = loaded.diff(ParallelPlan.load(other))
        click.echo(json.dumps(changes, indent=2) if as_json else "\n".join(changes) or "the plans are equal")
    elif schedule or png is not None:
        _timeline(loaded, png, as_json)
    elif as_json:
        click.echo(loaded.to_json(), nl=False)
    else:
        click.echo(loaded.explain(), nl=False)


def _timeline(plan: ParallelPlan, png: Path | None, as_json: bool) -> None:
    from meshwright_pipeline.timeline import planned, text

    table = planned(plan)
    if png is not None:
        from meshwright.commands.timeline import draw

        assert plan.pipeline is not None
        draw(table, f"{plan.pipeline.schedule}, {plan.pipeline.microbatches} microbatches", png)
    if as_json:
        ranks = [[[a.kind, a.stage, a.microbatch] for a in actions] for actions in table.ranks]
        click.echo(json.dumps({"bubble": table.bubble, "alive": table.alive, "ranks": ranks}))
    else:
        click.echo(text(table))
