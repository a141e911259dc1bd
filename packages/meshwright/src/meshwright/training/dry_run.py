"""`meshwright train --dry-run`: everything up to the first step, on no rank at all."""

from __future__ import annotations

from typing import Any

import click

import meshwright as mw
from meshwright.recipes.schema import Recipe
from meshwright.training.building import make_model
from meshwright.training.data import Order, in_order, loader_of, rows_of, tokenizer_of
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.names import count_of
from meshwright_parallel.validation.checks import check_fit


def dry_run(recipe: Recipe, world_size: int, host: PluginHost, as_json: bool) -> None:
    """Check recipe, data and model, and print the plan for `world_size` ranks. Raises what training would raise."""
    tokenizer = tokenizer_of(recipe)
    rows = rows_of(recipe.data, recipe, tokenizer)
    if recipe.evaluation:
        held_out = rows_of(recipe.evaluation.data, recipe, tokenizer)
        in_order(len(held_out), recipe.batch_size // recipe.accumulate, None)
    with mw.deferred_init(values=False):
        model = make_model(recipe, tokenizer)
    example = next(
        iter(loader_of(rows, Order(len(rows), recipe.batch_size // recipe.accumulate, recipe.seed)))
    )
    plan: Any
    if recipe.plan.file:
        plan = mw.ParallelPlan.load(recipe.plan.file)
        check_fit(model, plan, example, host, world_size)
    else:
        plan = mw.plan(model, example, world_size=world_size, **recipe.keywords())
    if as_json:
        click.echo(plan.to_json(), nl=False)
        return
    click.echo(plan.explain())
    epochs = recipe.steps * recipe.batch_size / len(rows)
    click.echo(
        f"{count_of(len(rows), 'row')} of data, {epochs:.3g} epochs in {count_of(recipe.steps, 'step')}; nothing was trained"
    )
