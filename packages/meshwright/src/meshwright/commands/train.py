"""`meshwright train`: train a recipe. See `meshwright.training.loop`; docs/train.md has all fields."""

from __future__ import annotations

from typing import Any

import click

from meshwright import ranks
from meshwright.cli import State
from meshwright.recipes.recipe_input import read_recipe
from meshwright.recipes.schema import Recipe
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.names import count_of

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
        _dry_run(recipe, size or ranks.world_size(), state.host, as_json)
        return 0
    if size is None and not ranks.is_rank():
        from meshwright_dtensor.devices import default_device

        size = default_device().count()
    size = ranks.check_world_size(size, option="world_size=")
    if size > 1 and not ranks.is_rank():
        _rows(recipe)
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


def _rows(recipe: Recipe) -> tuple[Any, Any]:
    """The rows and the tokenizer. Text becomes tokens here, which may take long, so that ranks find them. Raises UsageError."""
    from meshwright.training.data import in_order, rows_of
    from meshwright.training.tokens import tokenizer_of

    tokenizer = tokenizer_of(recipe)
    if recipe.evaluation:
        held_out = rows_of(recipe.evaluation.data, recipe, tokenizer)
        in_order(len(held_out), recipe.batch_size // recipe.accumulate, None)
    return rows_of(recipe.data, recipe, tokenizer), tokenizer


def _dry_run(recipe: Recipe, world_size: int, host: PluginHost, as_json: bool) -> None:
    """Do all up to the first step, without ranks, and print the plan. Raises what training would raise."""
    import meshwright as mw
    from meshwright.training.data import Order, loader_of
    from meshwright.training.loop import passes_explained
    from meshwright.training.model_and_optimizer import make_model
    from meshwright_parallel.validation.checks import check_fit

    rows, tokenizer = _rows(recipe)
    with mw.deferred_init(values=False):
        model = make_model(recipe, tokenizer)
    order = Order(len(rows), recipe.batch_size // recipe.accumulate, recipe.seed)
    example = next(iter(loader_of(rows, order)))
    plan: Any
    if recipe.plan.file:
        plan = mw.ParallelPlan.load(recipe.plan.file)
        check_fit(model, plan, example, host, world_size)
    else:
        with passes_explained(recipe):
            plan = mw.plan(model, example, world_size=world_size, **recipe.keywords())
    if as_json:
        click.echo(plan.to_json(), nl=False)
        return
    click.echo(plan.explain())
    epochs = recipe.steps * recipe.batch_size / len(rows)
    data = f"{count_of(len(rows), 'row')} of data, {epochs:.3g} epochs in {count_of(recipe.steps, 'step')}"
    click.echo(f"{data}; nothing was trained")
