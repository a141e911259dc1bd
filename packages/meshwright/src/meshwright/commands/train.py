"""`meshwright train`: train a recipe. See `meshwright.training.loop`; docs/train.md has all fields."""

from __future__ import annotations

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.recipes.reading import read_recipe

GRACE = 600
"""Seconds that the ranks have for their last checkpoint after Ctrl-C or SIGTERM."""


@click.command("train")
@click.argument("words", nargs=-1, required=True, metavar="[RECIPE] [FIELD=VALUE]...")
@click.option(
    "--dry-run", is_flag=True, help="Check recipe, data and model, print the plan, and train nothing."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the last metrics, or the plan, as JSON on stdout."
)
@click.pass_obj
def command(state: State, words: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Train a model from a recipe: a TOML or YAML file, fields such as optimizer.lr=1e-3, or both.

    The run goes on from its last checkpoint, if its folder (the field out) has one: on any number of ranks, under any
    plan. Ctrl-C and SIGTERM save a checkpoint first; the exit code is then 130 or 143.
    """
    recipe = read_recipe(words)
    size = recipe.world_size
    if recipe.plan.file and size is None:
        from meshwright_dtensor.plan import ParallelPlan

        size = ParallelPlan.load(recipe.plan.file).world_size
    if dry_run:
        from meshwright.training.dry_run import dry_run as check

        check(recipe, size or ranks.world_size(), state.host, as_json)
        return 0
    if size is None and not ranks.is_rank():
        import torch

        size = torch.cuda.device_count() or 1
    size = ranks.check_world_size(size, option="world_size=")
    if size > 1 and not ranks.is_rank():
        return ranks.launch(size, state.arguments, grace=GRACE)

    import torch.distributed as dist

    from meshwright.training.log import Log
    from meshwright.training.loop import train

    log = Log(recipe, ranks.rank() == 0, as_json)
    try:
        code = train(recipe, log)
    finally:
        log.close()
    # the launcher ends all ranks once one has left with a code
    dist.barrier()
    dist.destroy_process_group()
    return code
