"""`meshwright explain`: a plan file for people, how two plan files differ, and why a plan is not another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from meshwright.cli import State
from meshwright.commands import options as opt
from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import StrategySpec
from meshwright_dtensor.utils.names import count_of

NOT_CHECKED = "not checked against a model: give --model to check names, shapes and the batch too"


@click.command("explain")
@click.argument("plan", type=click.Path(path_type=Path))
@opt.file("--diff", "other", help="Say what changes to this plan.")
@opt.number("--world-size", help="Also check that the plan fits this many ranks.")
@click.option("--schedule", is_flag=True, help="Draw the timeline of the pipeline's schedule.")
@opt.file("--png", help="Draw it into this file too.")
@opt.file("--html", help="Write it as one page that needs nothing else.")
@click.option("--report", is_flag=True, help="Only where time and memory go, and what to buy next.")
@click.option(
    "--why-not",
    multiple=True,
    metavar="NAME=VALUE",
    help="Say why the plan does not use a degree or an option, as tp=4; needs --model. Given again, each is answered.",
)
@click.option("--model", metavar="MODEL", help="Check the plan against this model, as for `plan`.")
@opt.batch_options
@click.option("--optimizer", help="For --why-not. [default: that of the plan]")
@click.option("--memory-limit", metavar="SIZE", help="For --why-not. [default: that of the plan]")
@click.option("--cluster", help="Cluster by name, or a file of one. [default: that of the plan]")
@click.option("--cost-model", help="For --why-not. [default: that of the plan]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    state: State,
    /,
    plan: Path,
    other: Path | None,
    world_size: int | None,
    schedule: bool,
    png: Path | None,
    html: Path | None,
    report: bool,
    why_not: tuple[str, ...],
    model: str | None,
    batch_size: int | None,
    sequence_length: int | None,
    cluster: str | None,
    as_json: bool,
    # --optimizer, --memory-limit, --cost-model
    **plan_again: str | None,
) -> None:
    """Say what a plan does and why; with --model, check that it fits. Neither takes any memory."""
    given = {"--batch-size": batch_size, "--sequence-length": sequence_length}
    opt.check_needs("--model", model is not None, given)
    opt.check_needs("--why-not", bool(why_not), {opt.option_name(k): v for k, v in plan_again.items()})
    writes: dict[str, object] = {"--html": html, "--report": report}
    draws = {**writes, "--png": png, "--schedule": schedule}
    reads: dict[str, object] = {"--model": model, "--cluster": cluster}
    opt.check_alone("--diff", other is not None, {**draws, "--why-not": why_not or None, **reads})
    opt.check_alone("--why-not", bool(why_not), draws)
    opt.check_alone("--schedule", schedule, {**writes, **reads})
    opt.check_folder("--html", html)
    opt.check_folder("--png", png)
    opt.check_image("--png", png)
    loaded = ParallelPlan.load(plan)
    loaded.validate_for(world_size, axes={entry.record.axis for entry in state.host.strategies().values()})
    for name in loaded.strategies.values():
        state.host.get(StrategySpec, name)
    if other is not None:
        changes = loaded.diff(ParallelPlan.load(other))
        click.echo(json.dumps(changes, indent=2) if as_json else "\n".join(changes) or "the plans are equal")
        return
    chosen = None
    if model is not None:
        planned, names = loaded.provenance.batch, {"batch_size": "rows", "sequence_length": "tokens"}
        # sizes that are not given are those of the batch that the plan was made for
        sizes = {argument: planned[name] for argument, name in names.items() if name in planned}
        chosen = opt.ModelChoice(model, batch_size, sequence_length, defaults=sizes)
    if why_not:
        if chosen is None:
            text = f"--why-not {why_not[0]} plans again, and a plan does not hold its model; give --model, and the batch"
            raise UsageError(text)
        _why_not(state, loaded, why_not, chosen, {"cluster": cluster, **plan_again}, as_json)
    elif schedule:
        _timeline(loaded, png, as_json)
    else:
        checked = None if chosen is None else _check(state, loaded, chosen)
        machine = _machine(state, loaded, cluster)
        if png is not None:
            from meshwright.pictures import draw_plan

            draw_plan(loaded, machine, state.host, png)
        if html is not None:
            from meshwright_planner.reports.page import page

            html.write_text(page(loaded, cluster=machine, host=state.host), encoding="utf-8")
        _print(state, loaded, machine, checked, report, as_json)


def _print(
    state: State, plan: ParallelPlan, machine: Cluster | None, fits: str | None, report: bool, as_json: bool
) -> None:
    """Print the plan, its report, and the verdict of the check."""
    from meshwright_planner import explain

    verdict = f"checked: the plan fits {fits}" if fits else NOT_CHECKED
    if as_json and report:
        data = explain(plan, cluster=machine, host=state.host).to_dict()
        click.echo(json.dumps({**data, "checked_against": fits}, indent=2))
    elif as_json:
        # stdout is the plan itself, which has no field for the verdict
        click.echo(verdict, err=True)
        click.echo(plan.to_json(), nl=False)
    else:
        if not report:
            click.echo(plan.explain())
        if plan.predicted is not None:
            click.echo(explain(plan, cluster=machine, host=state.host), nl=False)
        click.echo(verdict)


def _machine(state: State, plan: ParallelPlan, name: str | None) -> Cluster | None:
    """The cluster named by --cluster or by the plan; None if the plan names none, or one that is not installed."""
    from meshwright_planner.clusters.registry import cluster_of

    wanted = name or plan.provenance.cluster
    if wanted is None:
        return None
    try:
        return cluster_of(wanted, state.host, plan.world_size).running(plan.world_size)
    except PluginError:
        if name is not None:
            raise
        return None


def _check(state: State, plan: ParallelPlan, chosen: opt.ModelChoice) -> str:
    """What the plan was checked against, in words. Raises PlanError or UsageError where it does not fit."""
    from meshwright_parallel.validation.checks import check_fit
    from meshwright_planner.trace.batch import Batch

    model, batch = chosen.source().to_plan()
    check_fit(model, plan, batch, state.host, plan.world_size)
    sizes = Batch.of(batch)
    tokens = "" if sizes.sequence_length is None else f" of {count_of(sizes.sequence_length, 'token')}"
    return f"{type(model).__name__} and a batch of {count_of(sizes.size, 'row')}{tokens}"


def _why_not(
    state: State,
    plan: ParallelPlan,
    questions: Sequence[str],
    chosen: opt.ModelChoice,
    changes: Mapping[str, str | None],
    as_json: bool,
) -> None:
    from meshwright_planner.clusters.registry import cluster_of
    from meshwright_planner.reports.why_not import check_names, parse_pins, request_of, why_not
    from meshwright_planner.trace.batch import Batch

    wanted = [parse_pins(pins) for pins in questions]
    request = request_of(plan, **changes)
    for pins in wanted:
        check_names(pins, request, state.host)
    try:
        cluster_of(request.cluster, state.host)
    except PluginError as error:
        if changes["cluster"] is not None:
            raise
        raise UsageError(
            f"the plan's cluster is not installed ({error}); give --cluster, a name or the file it was planned for"
        ) from error
    model, batch = chosen.source().to_plan()
    sizes, made_for = Batch.of(batch), plan.provenance.batch
    rows = request.global_batch_size or sizes.size
    tokens = sizes.sequence_length
    if (rows, tokens) != (made_for.get("rows", rows), made_for.get("tokens", tokens)):
        raise UsageError(
            f"the plan was made for {dict(made_for)}, and this batch has {count_of(rows, 'row')} of {tokens} tokens; "
            "give the same batch, or plan for this one"
        )
    answers = [why_not(plan, model, batch, request, pins, state.host) for pins in wanted]
    data = [answer.to_dict() for answer in answers]
    text = json.dumps(data if len(data) > 1 else data[0]) if as_json else "".join(map(str, answers))
    click.echo(text, nl=as_json)


def _timeline(plan: ParallelPlan, png: Path | None, as_json: bool) -> None:
    from meshwright_pipeline.timeline import planned, text

    table = planned(plan)
    if png is not None:
        from meshwright.pictures import draw_schedule

        assert plan.pipeline is not None
        count = count_of(plan.pipeline.microbatches, "microbatch")
        draw_schedule(table, f"{plan.pipeline.schedule}, {count}", png)
    if as_json:
        ranks = [[[a.kind, a.stage, a.microbatch] for a in actions] for actions in table.ranks]
        click.echo(json.dumps({"bubble": table.bubble, "alive": table.alive, "ranks": ranks}))
    else:
        click.echo(text(table))
