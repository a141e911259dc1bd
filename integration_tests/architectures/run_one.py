"""One model on ranks against one device. Functions for a RankPool: top-level, all arguments by value."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.model.batch_size import call_arguments
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.plan import ParallelPlan
from meshwright_parallel.compile.report import regions
from meshwright_parallel.verification.compare import (
    NOISE_SPREAD,
    compare,
    merge_ranks,
    one_rounding_away,
    whole,
)

from .float64 import Float64
from .judge import TOLERANCES, Verdict, judge, label
from .layouts import Layout
from .subject import NotBuildable, Subject, seed_all

STEP_SEED = 4
COMPILED_STEPS = 3


class Failed(Exception):
    """A run that ended early, with its verdict."""

    @property
    def verdict(self) -> Verdict:
        return Verdict(*self.args)


@contextlib.contextmanager
def failing(where: str, refusals: bool) -> Iterator[None]:
    """Raise Failed for any exception; `refusals`: one of our errors is a refusal here."""
    try:
        yield
    except Exception as error:  # whatever is raised is the verdict
        refused = refusals and isinstance(error, MeshwrightError)
        raise Failed("refused" if refused else "error", f"{where}: {message(error)}") from error


def _gather(parts: list[Tensor], value: Tensor, *_: Any, **__: Any) -> None:
    parts[0].copy_(value)


ALONE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "is_initialized": lambda: False,
        "get_world_size": lambda *_: 1,
        "get_rank": lambda *_: 0,
        "all_gather": _gather,
        **dict.fromkeys(("all_reduce", "broadcast", "barrier"), lambda *_, **__: None),
    }
)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While open, code that uses torch.distributed sees one device: losses and quantisers use it to share values."""
    with contextlib.ExitStack() as stack:
        for name, function in ALONE.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        yield


def plan_one(
    rank: int,
    size: int,
    subject: Subject,
    layouts: Mapping[str, Layout],
    dtype: torch.dtype = torch.float32,
) -> dict[str, str | Verdict] | str:
    """Name of a layout -> its plan as JSON, or why there is none; only the reason where no model can be built.

    The first rank plans, as in `auto_parallelize`, where the model may ask for the world that it will run in.
    """
    quiet()
    if rank:
        return {}
    try:
        model = subject.model(dtype)
        batch = subject.batch(model, dtype)
        # not this model: some change when they run
        with alone():
            _step(subject, subject.model(dtype), batch)
    except NotBuildable as error:
        return str(error)
    except Exception as error:  # it does not train on one device: nothing to compare with
        return f"does not train on one device: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    plans: dict[str, str | Verdict] = {}
    for name, layout in layouts.items():
        plans[name] = _plan(model, batch, layout)
    return plans


def _plan(model: nn.Module, batch: Any, layout: Layout) -> str | Verdict:
    try:
        with failing("planning", refusals=True):
            plan = mw.plan(model, batch, world_size=layout.ranks, **layout.pins)
            assert isinstance(plan, ParallelPlan)
            compiled = tuple(rule.model_copy(update={"backend": layout.backend}) for rule in plan.compile)
            return plan.replace(compile=compiled).to_json()
    except Failed as failed:
        if failed.verdict.kind != "refused" or not layout.fallback:
            return failed.verdict
    return _plan(model, batch, replace(layout, pins={**layout.pins, **layout.fallback}, fallback={}))


def run_one(
    rank: int,
    size: int,
    subject: Subject,
    plan_json: str,
    dtype: torch.dtype = torch.float32,
    disputed: frozenset[str] = frozenset(),
) -> Verdict:
    """One training step under the plan: loss, every gradient and buffer against one device, and the generator after it.

    With compiled regions the last of COMPILED_STEPS, of which the first two show what the code does.

    The verdict is the same on every rank. With `disputed`, only what these labels name is judged. Raises Failed.
    """
    quiet()
    start = time.monotonic()
    model = subject.model(dtype)
    after_build = torch.get_rng_state()
    batch = subject.batch(model, dtype)
    plan = ParallelPlan.from_json(plan_json)
    with failing("parallelize", refusals=True):
        model = mw.parallelize(model, plan, batch=batch)
    with alone():
        single, near = subject.model(dtype), subject.model(dtype)
    _same_start(size, model, single, near)
    one_rounding_away(near.parameters())
    comparisons = compare(
        -1, "parameter", dict(single.named_parameters()), dict(model.named_parameters()), 0.0
    )
    if not torch.equal(after_build, torch.get_rng_state()):
        return Verdict("wrong", "construction left the generator elsewhere")
    with alone():
        steps = COMPILED_STEPS if plan.compile else 1
        losses, states = zip(*(_step(subject, some, batch, steps) for some in (single, near)), strict=True)
    with failing("step", refusals=False):
        loss, state = _step(subject, model, batch, steps)
    comparisons += compare(0, "loss", {"": losses[0]}, {"": loss}, TOLERANCES[dtype])
    noise = frozenset[str]()
    for kind, tensors in (("gradient", gradients), ("buffer", buffers)):
        values, parallel, perturbed = (tensors(some) for some in (single, model, near))
        # a buffer that a forward makes is there on the ranks of its stage
        staged = kind == "buffer" and stages_of(model) is not None
        comparisons += compare(
            0, kind, values, parallel, TOLERANCES[dtype], perturbed=perturbed, actual_only=staged
        )
        if dtype == torch.float64:
            noise |= _beyond_recognition(kind, values, perturbed)
    parameters = list(model.parameters())
    with torch.no_grad():
        sharded = sum(p.to_local().shape != p.shape for p in parameters)
    merged = merge_ranks(comparisons, stages_of(model) is not None)
    verdict = judge(merged, sharded, len(parameters), noise, disputed)
    # some reseed the generator from the clock (Reformer): then it is no measure
    if verdict.passed and torch.equal(*states) and not torch.equal(states[0], state):
        verdict = Verdict("wrong", "the step left the generator elsewhere")
    microbatches = plan.pipeline.microbatches if plan.pipeline is not None else 0
    verdict = replace(verdict, seconds=time.monotonic() - start, microbatches=microbatches)
    return _with_regions(verdict, model) if plan.compile else verdict


def _with_regions(verdict: Verdict, model: nn.Module) -> Verdict:
    """The verdict with the calls of the model's compiled regions, and the reasons of those that ran as they are."""
    rows = regions(model).rows
    reasons = Counter[str]()
    for row in rows:
        reasons.update(dict(row.reasons))
    # the others, but for these, were the first two of their kind
    compiled = sum(row.compiled for row in rows)
    told = tuple(f"{reason} ({count})" for reason, count in reasons.most_common(3))
    return replace(verdict, compiled=compiled, calls=compiled + reasons.total(), eager=told)


@torch.no_grad()
def _same_start(size: int, parallel: nn.Module, *singles: nn.Module) -> None:
    """Give models of one device the parallel one's values, where not even two of one device start alike."""
    first, second = (list(single.parameters()) for single in singles)
    alike: list[Any] = [None] * size
    dist.all_gather_object(alike, all(map(torch.equal, first, second)))
    if not all(alike):
        for a, b, value in zip(first, second, map(whole, parallel.parameters()), strict=True):
            assert value is not None
            a.copy_(value)
            b.copy_(value)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Of every parameter."""
    return {name: p.grad for name, p in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Under all their names: whether two are one buffer is known on the ranks of its stage only."""
    return dict(model.named_buffers(remove_duplicate=False))


def _beyond_recognition(
    kind: str, values: Mapping[str, Tensor | None], near: Mapping[str, Tensor | None]
) -> frozenset[str]:
    """Labels of the values of which one rounding of the initial weights moves more than NOISE_SPREAD."""
    result = set()
    for name, value in values.items():
        other = near[name]
        if value is not None and other is not None and value.is_floating_point() and value.numel():
            if (value - other).abs().max() > NOISE_SPREAD * max(value.abs().max(), other.abs().max()):
                result.add(label(kind, name))
    return frozenset(result)


def plan_and_run(rank: int, size: int, subject: Subject, layout: Layout) -> Verdict:
    """Both, where there is nothing else to do meanwhile: the first rank plans for all."""
    planned: list[Any] = [plan_one(rank, size, subject, {"": layout})]
    dist.broadcast_object_list(planned)
    if isinstance(planned[0], str):
        return Verdict("error", planned[0])
    plan = planned[0][""]
    return plan if isinstance(plan, Verdict) else run_one(rank, size, subject, plan)


def own_rounding(rank: int, size: int, subject: Subject) -> dict[str, float]:
    """Label -> how far rounding moves a value on one device, relative to its largest: the larger of the distance
    between float32 and float64, and of what one rounding of the initial weights does in float32."""
    quiet()
    runs = []
    for dtype, away in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        model = subject.model(dtype)
        if away:
            one_rounding_away(model.parameters())
        values = {label("loss", ""): _step(subject, model, subject.batch(model, dtype))[0]}
        values |= {
            label("gradient", name): p.grad for name, p in model.named_parameters() if p.grad is not None
        }
        values |= {label("buffer", name): b for name, b in model.named_buffers() if b.is_floating_point()}
        runs.append({name: value.double() for name, value in values.items() if value.numel()})
    exact, other, near = runs
    return {
        name: float(
            max((value - exact[name]).abs().max(), (value - near[name]).abs().max()) / value.abs().max()
        )
        for name, value in other.items()
        if name in exact and name in near
    }


def _step(subject: Subject, model: nn.Module, batch: Any, steps: int = 1) -> tuple[Tensor, Tensor]:
    """Forward and backward: the loss as a plain tensor, and the generator's state after it; of the last of several."""
    for _ in range(steps - 1):
        _step(subject, model, batch)
        model.zero_grad()
    seed_all(STEP_SEED)
    double = any(p.dtype == torch.float64 for p in model.parameters())
    args, kwargs = call_arguments(batch)
    with Float64() if double else contextlib.nullcontext():
        loss = subject.loss(model(*args, **kwargs), batch)
        loss.backward()
    value = whole(loss)
    assert value is not None
    return value, torch.get_rng_state()


def message(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def quiet() -> None:
    """What libraries have to say about tiny models is of no use here."""
    warnings.simplefilter("ignore")
    for name in ("transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
