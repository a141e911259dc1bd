"""Train a recipe: plan, apply, go on where the run ended, and the loop of one device. All ranks run it.

What makes it parallel: `mw.deferred_init`, `mw.auto_parallelize` (or `mw.parallelize`), `mw.shard_loader`, `mw.load` and
`mw.save`. The rest is what a trainer for one device needs too.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.ranks import first_rank_first, signals
from meshwright.recipes.schema import Recipe
from meshwright.runs.loss_guard import LossGuard, fault_on_all
from meshwright.runs.run_states import LastState, RunStates
from meshwright.runs.stragglers import StragglerWatch
from meshwright.sources import loss_of
from meshwright.training.data import (
    IGNORED,
    Order,
    check_same,
    identity,
    in_order,
    loader_of,
    rows_of,
    settings_of,
)
from meshwright.training.log import Log, memory
from meshwright.training.model_and_optimizer import export, make_model, make_optimizer, set_rate
from meshwright.training.tokens import tokenizer_of
from meshwright.training.utilisation import model_flops
from meshwright_checkpoint.state import rng
from meshwright_checkpoint.state.collect import config_of
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.mesh.mesh import extremes

Batch = dict[str, torch.Tensor]


@dataclass
class Run:
    """What a loop needs: checkpoints, batches without end, those of the evaluation, `done`, which checkpoints keep, and operations
    of a step (None if unknown); who names slow ranks, if anybody."""

    recipe: Recipe
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    states: RunStates
    batches: Iterator[Batch]
    held_out: Iterable[Batch]
    done: dict[str, Any]
    flops: float | None = None
    watch: StragglerWatch | None = None


def train(recipe: Recipe, log: Log) -> int:
    """Train until the last step or a signal. The exit code: 0, or 128 and the signal.

    log: is told on every rank what happens; only that of rank 0 shows and writes it.
    Raises what planning, applying and loading raise, and UsageError where recipe, data and model do not fit.
    """
    run, guard = set_up(recipe), LossGuard(recipe.spike, recipe.rewinds)
    done, received = run.done, 0
    guard.last = done.pop("losses", [])

    def state() -> dict[str, Any]:
        return {**done, "losses": guard.last}

    log.begin(run.model, done["step"], run.flops)
    log.damaged(done["step"], run.states.damaged)
    with signals() as arrived:
        while done["step"] < recipe.steps and not received:
            start = time.perf_counter()
            rate = set_rate(recipe, run.optimizer, done["step"])
            batches = [on(run.device, batch) for batch in islice(run.batches, recipe.accumulate)]
            loss, norm = train_step(run, batches)
            done["rows_seen"] += recipe.batch_size
            if recipe.rewinds and (fault := fault_of_step(guard, loss, norm)):
                fault = f"step {done['step'] + 1}: {fault}"
                go_back(run, guard, fault)
                log.went_back(done["step"], fault)
                log.damaged(done["step"], run.states.damaged)
                continue
            done["step"] += 1
            step, last = done["step"], done["step"] == recipe.steps
            if not math.isfinite(loss + norm):
                run.states.end(step)
                fix = "lower optimizer.lr, or raise schedule.warm_up"
                raise UsageError(f"step {step}: the loss is {loss}, and the gradient's norm {norm}; {fix}")
            received, used = (most for _, most in extremes([arrived(), memory(run.device)], None))
            log.step(step, loss, norm, rate, batches, time.perf_counter() - start, used)
            log.slow_ranks(step, () if run.watch is None else run.watch.slow)
            if last or received or step % recipe.checkpoints.interval == 0:
                guard.forgive()
                run.states.save(run.model, run.optimizer, state(), step)
            run.states.copy(run.model, run.optimizer, state, step)
            if recipe.evaluation and not received and (last or step % recipe.evaluation.interval == 0):
                log.evaluated(step, evaluate(run))
        run.states.end(done["step"])
    if recipe.export and not received:
        export(recipe, recipe.export, run.model, first=log.active)
    log.end(done["step"], received)
    return 128 + received if received else 0


def set_up(recipe: Recipe) -> Run:
    """Plan, apply the plan, and go on from the latest checkpoint of the run's folder. Raises as `train`."""
    device, tokenizer, watched = (
        mw.init(deterministic=recipe.deterministic),
        tokenizer_of(recipe),
        recipe.evaluation,
    )
    rows = first_rank_first(lambda: rows_of(recipe.data, recipe, tokenizer))
    held_out = first_rank_first(lambda: rows_of(watched.data, recipe, tokenizer)) if watched else []
    size = recipe.batch_size // recipe.accumulate
    watching = in_order(len(held_out), size, watched.batches) if watched else []
    example = on(device, next(iter(loader_of(rows, Order(len(rows), size, recipe.seed)))))

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(recipe.seed)
    with mw.deferred_init():
        model = make_model(recipe, tokenizer)
    done: dict[str, Any] = {"step": 0, "rows_seen": 0, "losses": []}
    same = identity(rows, recipe, tokenizer)
    fixed = same | settings_of(config_of(model))
    kept = recipe.checkpoints
    retention = Retention(kept.keep_last, kept.keep_every)
    states = RunStates(Path(recipe.out) / "checkpoints", retention, kept.peer_copies)
    state = states.last()
    if state is not None:
        check_goes_on(state, fixed, recipe)
    flops = model_flops(model, example, recipe.precision) if dist.get_rank() == 0 else None
    if recipe.plan.file:
        model = mw.parallelize(model, mw.ParallelPlan.load(recipe.plan.file), batch=example)
    else:
        with passes_explained(recipe):
            model = mw.auto_parallelize(model, example, **recipe.keywords())
    optimizer = make_optimizer(recipe, model)
    if recipe.check_replicas:
        mw.watch_replicas(model, optimizer, recipe.check_replicas)
    interval = recipe.check_stragglers
    watch = None if interval is None else mw.watch_stragglers(model, optimizer, interval)

    def batches(rows: Any, order: Iterable[list[int]], workers: int) -> Iterable[Batch]:
        return mw.shard_loader(loader_of(rows, order, workers), model=model)

    if state is not None:
        # it may be an older one
        state = load_into(states, state, model, optimizer)
        check_goes_on(state, fixed, recipe)
        done = {name: state.manifest.extra.get(name, first) for name, first in done.items()}
    elif isinstance(recipe.model, str) and Path(recipe.model).is_dir():
        mw.load(recipe.model, model=model, cast=True)
    states.check_room(model, optimizer)
    order = Order(len(rows), size, recipe.seed, first=done["rows_seen"])
    endless = iter(batches(rows, order, recipe.data.workers))
    evaluated = batches(held_out, watching, watched.data.workers if watched else 0)
    flops = None if flops is None else flops * recipe.accumulate
    return Run(recipe, device, model, optimizer, states, endless, evaluated, {**done, **same}, flops, watch)


@contextmanager
def passes_explained(recipe: Recipe) -> Iterator[None]:
    """Where no plan fits, say how a pass has fewer rows, while a step keeps its own. Raises InfeasibleError."""
    try:
        yield
    except InfeasibleError as error:
        rows, now = recipe.batch_size, recipe.accumulate
        more = next((n for n in range(now + 1, rows + 1) if rows % n == 0), None)
        if more is None:
            raise
        text = (
            f"With accumulate = {more} (now {now}) a pass has {rows // more} rows instead of {rows // now}.\n"
            f"A step keeps its {rows} rows and its loss, with the dropout of that many passes; a run may go on with it."
        )
        raise InfeasibleError(f"{error}\n{text}", listed=True) from None


def check_goes_on(state: LastState, now: dict[str, Any], recipe: Recipe) -> None:
    """Check that a run goes on from a state with what must be equal. Raises UsageError."""
    saved = state.manifest
    check_same(saved.extra | settings_of(saved.model.config), now, recipe.out)


def load_into(
    states: RunStates,
    state: LastState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    in_memory: bool = True,
) -> LastState:
    """Load a state of the run, or an older one where it is damaged (a collective call). Returns the one that was loaded."""
    loaded, _ = states.load(state, model, optimizer, in_memory)
    for group in optimizer.param_groups:
        # the recipe's settings, not those that were saved
        group.update(optimizer.defaults)
    return loaded


def fault_of_step(guard: LossGuard, loss: float, norm: float) -> str:
    """Why a step is none to go on from, on any rank; "" if it is one (a collective call)."""
    return fault_on_all(
        guard.fault_of(loss) or ("" if math.isfinite(norm) else f"the gradient's norm is {norm}")
    )


def go_back(run: Run, guard: LossGuard, fault: str) -> None:
    """Go back to the last checkpoint, but not to its rows (a collective call). Raises UsageError: too often, or there is none."""
    fix = "lower optimizer.lr, raise schedule.warm_up, or look at these rows"
    try:
        guard.count(fault)
    except FloatingPointError as error:
        raise UsageError(str(error)) from error
    if run.watch is not None:
        run.watch.pause()
    state = run.states.committed()
    if state is None:
        raise UsageError(f"{fault}, and there is no checkpoint to go back to yet; {fix}")
    state = load_into(run.states, state, run.model, run.optimizer, in_memory=False)
    run.done["step"], guard.last = state.manifest.extra["step"], state.manifest.extra.get("losses", [])


def train_step(run: Run, batches: list[Batch]) -> tuple[float, float]:
    """One step of the optimizer over all batches: the loss, and the norm of the gradient before it was clipped."""
    weights = [weight(run, batch) for batch in batches]
    total = 0.0
    for batch, share in zip(batches, weights, strict=True):
        loss = loss_of(run.model(**batch)) * (share / sum(weights))
        loss.backward()
        total += loss.item()
    norm = mw.clip_grad_norm_(run.model.parameters(), run.recipe.clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return total, norm.item()


def evaluate(run: Run) -> float:
    """The mean loss over the batches that are held out; training goes on with the random numbers that it had."""
    total = seen = 0.0
    streams = rng.state()
    training = [module for module in run.model.modules() if module.training]
    run.model.eval()
    with torch.no_grad():
        for batch in (on(run.device, batch) for batch in run.held_out):
            share = weight(run, batch)
            total += loss_of(run.model(**batch)).item() * share
            seen += share
    for module in training:
        module.training = True
    # the checkpoint of this step is written already, and a run without an evaluation draws none
    rng.restore(streams)
    return total / seen


def weight(run: Run, batch: Batch) -> int:
    """How much the mean loss of a batch counts: as its labels where rows are padded, all batches alike otherwise."""
    if run.recipe.packing or "labels" not in batch:
        return 1
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
