"""`meshwright simulate`: a plan replayed on the model of its cluster, with slow ranks and bad links."""

from __future__ import annotations

import json
from pathlib import Path

import click

from meshwright.cli import State
from meshwright.commands.options import check_folder, file
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan


@click.command("simulate")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--cluster", help="Cluster by name. [default: that of the plan]")
@click.option(
    "--straggler",
    "stragglers",
    multiple=True,
    metavar="RANK=SLOWDOWN",
    help="A rank that computes so many times as long, 5=1.5; node1=1.2 for a whole node.",
)
@click.option(
    "--link-fault",
    "links",
    multiple=True,
    metavar="RANK:LINK=SHARE",
    help="A link at a share of its bandwidth, 5:nvlink=0.5; 0 where it is gone; node1:infiniband=0.5 for a whole node.",
)
@file("--trace", help="Write a trace for Perfetto here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    state: State,
    plan: Path,
    cluster: str | None,
    stragglers: tuple[str, ...],
    links: tuple[str, ...],
    trace: Path | None,
    as_json: bool,
) -> None:
    """Replay one step of a plan, event by event: how long it takes, and which rank waits for which."""
    from meshwright_planner.clusters.registry import cluster_of
    from meshwright_planner.simulation.faults import parse_link_fault, parse_straggler
    from meshwright_planner.simulation.replay import simulate

    check_folder("--trace", trace)
    loaded = ParallelPlan.load(plan)
    name = cluster or loaded.provenance.cluster
    if name is None:
        raise UsageError(f"{plan} does not name its cluster; give --cluster")
    try:
        machine = cluster_of(name, state.host, loaded.world_size).running(loaded.world_size)
    except PluginError as error:
        if cluster is not None:
            raise
        raise UsageError(
            f"the plan's cluster is not installed ({error}); give --cluster, a name or a file"
        ) from error
    simulated = simulate(
        loaded,
        machine,
        stragglers=[s for text in stragglers for s in parse_straggler(text, machine, loaded.world_size)],
        link_faults=[f for text in links for f in parse_link_fault(text, machine, loaded.world_size)],
        host=state.host,
    )
    if trace is not None:
        trace.write_text(json.dumps(simulated.trace()))
    click.echo(json.dumps(simulated.to_dict()) if as_json else simulated.render(), nl=as_json)
