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
from itertools import islice
from pathlib import Path
from typing import TypeVar

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


def train(recipe: Recipe, log: Log) -> int:
    """Train until the last step or a signal. The exit code: 0, or 128 and the signal.

    log: is told on every rank what happens; only that of rank 0 shows and writes it.
    Raises what planning, applying and loading raise, and UsageError where recipe, data and model do not fit.
    """
    device = mw.init()
    tokenizer = tokenizer_of(recipe)
    rows = first_rank_first(lambda: rows_of(recipe.data, recipe, tokenizer))
    watched = recipe.evaluation
    held_out = first_rank_first(lambda: rows_of(watched.data, recipe, tokenizer) if watched else [])

    torch.manual_seed(recipe.seed)
    with mw.deferred_init():
        model = make_model(recipe, tokenizer)
    size = recipe.batch_size // recipe.accumulate
    example = next(iter(loader_of(rows, Order(len(rows), size, recipe.seed))))
    example = on(device, example)
    if recipe.plan.file:
        model = mw.parallelize(model, mw.ParallelPlan.load(recipe.plan.file), batch=example)
    else:
        model = mw.auto_parallelize(model, example, **recipe.keywords())
    optimizer = make_optimizer(recipe, model)

    done = {"step": 0, "rows_seen": 0, **identity(rows, recipe)}
    if path := mw.latest(Path(recipe.out) / "checkpoints"):
        done = same_data(mw.load(path, model=model, optimizer=optimizer), done, recipe)
    elif weights := weights_of(recipe):
        mw.load(weights, model=model, cast=True)
    log.begin(model, done["step"])

    order = Order(len(rows), size, recipe.seed, first=done["rows_seen"])
    batches = iter(mw.shard_loader(loader_of(rows, order, recipe.data.workers), model=model))
    saving, received = None, 0
    with signals() as arrived:
        while done["step"] < recipe.steps and not received:
            start = time.perf_counter()
            rate = set_rate(recipe, optimizer, done["step"])
            step_batches = [on(device, batch) for batch in islice(batches, recipe.accumulate)]
            loss, norm = train_step(model, optimizer, step_batches, recipe.clip_norm)
            done.update(step=done["step"] + 1, rows_seen=done["rows_seen"] + recipe.batch_size)
            step, last = done["step"], done["step"] == recipe.steps
            if not math.isfinite(norm):
                raise UsageError(
                    f"step {step}: the gradient's norm is {norm}; lower optimizer.lr, or raise schedule.warm_up"
                )
            received, used = largest(max(arrived, default=0), memory(device))
            log.step(step, loss, norm, rate, step_batches, time.perf_counter() - start, used)
            if watched and (step % watched.every == 0 or last):
                whole = in_order(len(held_out), size)[: watched.batches]
                log.evaluated(step, evaluate(model, loader_of(held_out, whole, watched.data.workers), device))
            if step % recipe.checkpoints.every == 0 or last or received:
                keep = recipe.checkpoints.model_dump(include={"keep_last", "keep_every"})
                where = Path(recipe.out) / "checkpoints" / f"step-{step}"
                saving = mw.save(where, model=model, optimizer=optimizer, extra=done, **keep)
    if saving is not None:
        saving.wait()
    if recipe.export and not received:
        mw.export(recipe.export, model=model)
    log.end(done["step"], received)
    return 128 + received if received else 0


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


def evaluate(model: nn.Module, loader: Iterable[Batch], device: torch.device) -> float:
    """The mean loss over batches, which are the same on every rank."""
    total = seen = 0.0
    model.eval()
    with torch.no_grad():
        for batch in mw.shard_loader(loader, model=model):
            share = weight(batch)
            total += loss_of(model(**on(device, batch))).item() * share
            seen += share
    model.train()
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
                "in the same order; give what it was, or another out"
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
