"""`meshwright trial`: plans run for a few real steps on ranks of this machine, and timed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.commands.options import (
    ModelChoice,
    batch_options,
    check_alone,
    file,
    number,
    optimizer_option,
)
from meshwright.sources import Source
from meshwright.stock_optimizers import HELP, OPTIMIZERS, check_stepped
from meshwright.trial import STEPS, measure
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan


@click.command("trial")
@click.argument("plans", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--model", metavar="MODEL", help="As for `plan`.")
@batch_options
@number("--seed", help="As for `plan`. [default: 0]")
@file("--saved", help="In place of --model: a pickled (model, batch).")
@optimizer_option(HELP)
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Steps that count.")
@file("--output", help="Write what was measured here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    state: State,
    plans: tuple[Path, ...],
    model: str | None,
    batch_size: int | None,
    sequence_length: int | None,
    seed: int | None,
    saved: Path | None,
    optimizer: str,
    steps: int,
    output: Path | None,
    as_json: bool,
) -> int:
    """Run plans for a few real steps on ranks of this machine, and say what a step took. Only load what you have saved."""
    check_stepped("trial", optimizer, "try plans for any other with adamw")
    if (model is None) == (saved is None):
        raise UsageError("what is to be run: give either --model or --saved")
    sizes = {"--batch-size": batch_size, "--sequence-length": sequence_length, "--seed": seed}
    check_alone("--saved", saved is not None, sizes)
    loaded = [ParallelPlan.load(path) for path in plans]
    counts = sorted({plan.world_size for plan in loaded})
    if len(counts) > 1:
        rule = f"the plans are of {counts} ranks: try those of one size"
        raise PlanError("world_size", counts[1], rule, str(counts[0]))
    size = ranks.check_world_size(counts[0])
    if not ranks.is_rank():
        return ranks.launch(size, state.arguments)

    import torch
    import torch.distributed as dist

    import meshwright as mw

    mw.init()
    torch.set_num_threads(1)
    if saved is not None:
        instance, batch = torch.load(saved, weights_only=False)
        source = Source(str(saved), lambda: (copy.deepcopy(instance), batch), batch)
    else:
        assert model is not None
        source = ModelChoice(model, batch_size, sequence_length, seed or 0).source()
    seconds = [measure(source.make, source.batch, plan, OPTIMIZERS[optimizer], steps) for plan in loaded]
    if ranks.rank() == 0:
        data = json.dumps({"seconds": seconds, "steps": steps, "plans": [str(p) for p in plans]})
        if output is not None:
            output.write_text(data)
        if as_json:
            click.echo(data)
        else:
            for path, plan, taken in zip(plans, loaded, seconds, strict=True):
                line = f"{path}: {1e3 * taken:.4g} ms a step"
                if plan.predicted is not None:
                    line += f", {1e3 * plan.predicted.step_seconds:.4g} ms predicted"
                click.echo(line)
    dist.destroy_process_group()
    return 0
