"""The records of this distribution: the commands of the `meshwright` command line."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.plugins import CommandSpec, PlannerSpec, hookimpl

meshwright_hook_api = "1.0"


@hookimpl
def meshwright_commands() -> Iterator[CommandSpec]:
    """The first-party commands. The target of a CommandSpec is a `click.Command`."""
    for name, summary in (
        ("plan", "plan the parallelism of a model"),
        ("explain", "say what a plan does and why"),
        ("simulate", "replay a plan with slow ranks and bad links"),
        ("verify", "check a plan against one device, every gradient"),
        ("trial", "run plans for a few steps here, and time them"),
        ("train", "train a model from a recipe"),
        ("demo", "train a small model in parallel and on one device, and compare"),
        ("calibrate", "measure this machine, to plan for it"),
        ("plugins", "list what is installed, and what is broken"),
        ("doctor", "report the environment"),
    ):
        yield CommandSpec(name=name, target=f"meshwright.commands.{name}:command", summary=summary)


@hookimpl
def meshwright_planners() -> Iterator[PlannerSpec]:
    """The planner `trial`, which runs the plans that it compares."""
    yield PlannerSpec(
        name="trial",
        target="meshwright.trial:TrialPlanner",
        summary="the default planner's best plans run for a few steps on this machine, the fastest kept",
    )
