"""Train a recipe: plan, apply, go on where the run ended, and the loop of one device. All ranks run it.

What makes it parallel: `mw.deferred_init`, `mw.auto_parallelize` (or `mw.parallelize`), `mw.shard_loader`, `mw.load` and
`mw.save`. The rest is what a trainer for one device needs too.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.recipes.schema import Recipe
from meshwright.sources import loss_of
from meshwright.training.building import make_model, make_optimizer, set_rate, weights_of
from meshwright.training.data import IGNORED, Order, identity, in_order, loader_of, rows_of, tokenizer_of
from meshwright.training.log import Log, memory
from meshwright_dtensor.errors import UsageError

T = TypeVar("T")
Batch = dict[str, torch.Tensor]


@dataclass
class Run:
    """What a loop needs: batches go on for ever, `held_out` is the evaluation's, and `done` is kept in checkpoints."""

    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    held_out: Iterable[Batch] | None
    done: dict[str, int]


def train(recipe: Recipe, log: Log) -> int:
    """Train until the last step or a signal. The exit code: 0, or 128 and the signal.

    log: is told on every rank what happens; only that of rank 0 shows and writes it.
    Raises what planning, applying and loading raise, and UsageError where recipe, data and model do not fit.
    """
    run = set_up(recipe)
    model, optimizer, done = run.model, run.optimizer, run.done
    log.begin(model, done["step"])
    saving, received = None, 0
    with signals() as arrived:
        while done["step"] < recipe.steps and not received:
            start = time.perf_counter()
            rate = set_rate(recipe, optimizer, done["step"])
            batches = [on(run.device, batch) for batch in islice(run.batches, recipe.accumulate)]
            loss, norm = train_step(model, optimizer, batches, recipe.clip_norm)
            done.update(step=done["step"] + 1, rows_seen=done["rows_seen"] + recipe.batch_size)
            step, last = done["step"], done["step"] == recipe.steps
            if not math.isfinite(loss + norm):
                fix = "lower optimizer.lr, or raise schedule.warm_up"
                raise UsageError(f"step {step}: the loss is {loss}, and the gradient's norm {norm}; {fix}")
            received, used = largest(max(arrived, default=0), memory(run.device))
            log.step(step, loss, norm, rate, batches, time.perf_counter() - start, used)
            if recipe.evaluation and (last or step % recipe.evaluation.interval == 0):
                log.evaluated(step, evaluate(run))
            if last or received or step % recipe.checkpoints.interval == 0:
                keep = recipe.checkpoints.model_dump(include={"keep_last", "keep_every"})
                saving = mw.save(
                    folder_of(recipe) / f"step-{step}", model=model, optimizer=optimizer, extra=done, **keep
                )
    if saving is not None:
        saving.wait()
    if recipe.export and not received:
        mw.export(recipe.export, model=model)
    log.end(done["step"], received)
    return 128 + received if received else 0


def set_up(recipe: Recipe) -> Run:
    """Plan, apply the plan, and go on from the latest checkpoint of the run's folder. Raises as `train`."""
    device, tokenizer, watched = mw.init(), tokenizer_of(recipe), recipe.evaluation
    rows = first_rank_first(lambda: rows_of(recipe.data, recipe, tokenizer))
    held_out = first_rank_first(lambda: rows_of(watched.data, recipe, tokenizer)) if watched else []
    size = recipe.batch_size // recipe.accumulate

    torch.manual_seed(recipe.seed)
    with mw.deferred_init():
        model = make_model(recipe, tokenizer)
    example = on(device, next(iter(loader_of(rows, Order(len(rows), size, recipe.seed)))))
    if recipe.plan.file:
        model = mw.parallelize(model, mw.ParallelPlan.load(recipe.plan.file), batch=example)
    else:
        model = mw.auto_parallelize(model, example, **recipe.keywords())
    optimizer = make_optimizer(recipe, model)

    done = {"step": 0, "rows_seen": 0, **identity(rows, recipe)}
    if path := mw.latest(folder_of(recipe)):
        done = same_data(mw.load(path, model=model, optimizer=optimizer), done, recipe)
        for group in optimizer.param_groups:
            # the recipe's settings, not those that were saved
            group.update(optimizer.defaults)
    elif weights := weights_of(recipe):
        mw.load(weights, model=model, cast=True)

    def sharded(rows: Any, order: Iterable[list[int]], workers: int) -> Any:
        return mw.shard_loader(loader_of(rows, order, workers), model=model)

    order = Order(len(rows), size, recipe.seed, first=done["rows_seen"])
    evaluated = (
        sharded(held_out, in_order(len(held_out), size, watched.batches), watched.data.workers)
        if watched
        else None
    )
    return Run(device, model, optimizer, iter(sharded(rows, order, recipe.data.workers)), evaluated, done)


def folder_of(recipe: Recipe) -> Path:
    """Where the checkpoints of a run are."""
    return Path(recipe.out) / "checkpoints"


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], clip: float
) -> tuple[float, float]:
    """One step of the optimizer over all batches: the loss, and the norm of the gradient before it was clipped."""
    weights = [weight(batch) for batch in batches]
    total = 0.0
    for batch, share in zip(batches, weights, strict=True):
        loss = loss_of(model(**batch)) * (share / sum(weights))
        loss.backward()
        total += loss.item()
    norm = mw.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.item()


def evaluate(run: Run) -> float:
    """The mean loss over the batches that are held out."""
    total = seen = 0.0
    run.model.eval()
    with torch.no_grad():
        for batch in run.held_out or ():
            share = weight(batch)
            total += loss_of(run.model(**on(run.device, batch))).item() * share
            seen += share
    run.model.train()
    return total / seen


def weight(batch: Batch) -> int:
    """How much the mean loss of a batch counts: by its labels where rows are padded, all batches alike otherwise."""
    return int((batch["labels"][:, 1:] != IGNORED).sum()) if "attention_mask" in batch else 1


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def first_rank_first(work: Callable[[], T]) -> T:
    """What `work` returns, on every rank, after it was done on rank 0: the others find the files that it wrote."""
    first, failed = dist.get_rank() == 0, list[Exception | None]([None])
    if first:
        try:
            result = work()
        except Exception as error:
            failed = [error]
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]
    return result if first else work()


def same_data(loaded: dict[str, int], new: dict[str, int], recipe: Recipe) -> dict[str, int]:
    """What was done before, if the run can go on with the same rows in the same order. Raises UsageError."""
    for name, value in new.items():
        if name not in ("step", "rows_seen") and loaded[name] != value:
            raise UsageError(
                f"{recipe.out} was trained with {name} = {loaded[name]}, and now it is {value}: a run goes on with the same rows "
                "in the same order; give the earlier value, or another out"
            )
    return loaded


def largest(*values: float) -> tuple[int, ...]:
    """The largest of each value on all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tuple(int(value) for value in tensor.tolist())


@contextmanager
def signals() -> Iterator[list[int]]:
    """Inside, SIGINT (Ctrl-C) and SIGTERM do nothing but appear in the list."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
