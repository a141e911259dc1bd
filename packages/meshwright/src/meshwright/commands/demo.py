"""`meshwright demo`: the main job. See `meshwright.demo.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.commands.options import SHARING, Named, file, number, with_options
from meshwright.sources import TOKENS

MODELS = ("gpt2", "llama", "bert", "vit")
AXES = {"dp": "data", "cp": "context", "tp": "tensor"}


@click.command("demo")
@click.option("--model", type=Named(*MODELS), default="gpt2", show_default=True, help="Architecture.")
@number("--steps", default=50, show_default=True, help="Optimizer steps.")
@number("--world-size", help="Ranks to start here. [default: the plan's, or 4; a job's own under torchrun]")
@with_options(
    *(number(f"--{axis}", help=f"Pin the {name}-parallel degree.") for axis, name in AXES.items()), *SHARING
)
@file("--plan", help="Apply this plan instead of planning.")
@file("--text", help="Train on this file. [default: the standard library]")
@number("--batch-size", default=8, show_default=True, help="Rows of the global batch.")
@number("--sequence-length", help=f"Tokens of a row. [default: {TOKENS}]")
@click.option("--optimizer", type=Named("adamw", "sgd"), default="adamw", show_default=True)
@click.option("--learning-rate", type=float, help="Peak rate. [default: the optimizer's]")
@number("--seed", default=0, show_default=True)
@file("--out", default=Path("meshwright-run"), show_default=True, help="Folder for results.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.pass_obj
def command(
    state: State,
    /,
    model: str,
    world_size: int | None,
    plan: Path | None,
    sequence_length: int | None,
    out: Path,
    as_json: bool,
    **settings: Any,
) -> int:
    """Train an unmodified model in parallel and on one device, and compare the loss of every step.

    Exit code 4 if a loss differs by more than 5e-6 (with half precision, where one device computes in float32:
    by more than 5e-2).
    """
    loaded = None
    if plan is not None:
        from meshwright_dtensor.plan import ParallelPlan

        loaded = ParallelPlan.load(plan)
    size = ranks.check_world_size(world_size, default=loaded.world_size if loaded else 4)
    if size > 1 and not ranks.is_rank():
        return ranks.launch(size, state.arguments)

    import torch.distributed as dist

    from meshwright.demo.report import Report
    from meshwright.demo.train import Options, run
    from meshwright.sources import check_tokens

    check_tokens(model, sequence_length)
    degrees = {axis: degree for axis in AXES if (degree := settings.pop(axis)) is not None}
    tokens = TOKENS if sequence_length is None else sequence_length
    options = Options(model=model, degrees=degrees, plan=plan, sequence_length=tokens, **settings)
    report = Report(out, as_json) if ranks.rank() == 0 else None
    try:
        outcome = run(options, report)
    finally:
        if report:
            report.close()
    if report:
        report.finished(outcome)
    # Every rank leaves with the verdict of rank 0.
    passed = [outcome.passed if report else None]
    dist.broadcast_object_list(passed, src=0)
    dist.destroy_process_group()
    return 0 if passed[0] else 4
