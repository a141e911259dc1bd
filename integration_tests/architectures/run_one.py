"""One architecture on ranks against one device. Functions for a RankPool: top-level, all arguments by value."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_parallel.verification.compare import (
    NOISE_SPREAD,
    compare,
    merge_ranks,
    one_rounding_away,
    whole,
)

from .batches import batch_of
from .catalogue import Architecture, NotBuildable, build
from .float64 import Float64
from .judge import TOLERANCES, Verdict, judge, label
from .layouts import LAYOUTS, world_size

SEED, STEP_SEED = 3, 4


def plan_one(
    rank: int, size: int, architecture: Architecture, layouts: list[str], dtype: torch.dtype = torch.float32
) -> dict[str, str] | str:
    """Layout -> its plan as JSON, or "!" and why there is none; only the reason where no tiny model can be built."""
    _quiet()
    try:
        model = _model(architecture, dtype)
    except NotBuildable as error:
        return str(error)
    batch = _batch(architecture, model, dtype)
    try:
        loss_of(
            _model(architecture, dtype)(**batch), batch
        ).backward()  # not this one: some change when they run
    except Exception as error:  # it does not train on one device: nothing to compare with
        return f"does not train on one device: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    plans = {}
    for layout in layouts:
        try:
            result = mw.plan(model, batch, world_size=world_size(layout), **LAYOUTS[layout])
            assert isinstance(result, ParallelPlan)
            plans[layout] = result.to_json()
        except Exception as error:  # whatever planning raises is the verdict
            plans[layout] = f"!planning: {_message(error)}"
    return plans


def run_one(
    rank: int,
    size: int,
    architecture: Architecture,
    plan_json: str,
    dtype: torch.dtype = torch.float32,
    disputed: frozenset[str] = frozenset(),
) -> Verdict:
    """One training step under the plan: loss, every gradient and buffer against one device; the same on every rank.

    With `disputed`, only what these labels name is judged.
    """
    _quiet()
    start = time.monotonic()
    model = _model(architecture, dtype)
    after_build = torch.get_rng_state()
    batch = _batch(architecture, model, dtype)
    model = mw.parallelize(model, ParallelPlan.from_json(plan_json), batch=batch)
    single, near = _model(architecture, dtype), _model(architecture, dtype)
    one_rounding_away(near.parameters())
    comparisons = compare(
        -1, "parameter", dict(single.named_parameters()), dict(model.named_parameters()), 0.0
    )
    if not torch.equal(after_build, torch.get_rng_state()):
        return Verdict("wrong", "construction left the generator elsewhere")
    losses = [_step(some, batch) for some in (single, model, near)]
    gradients, result, near_gradients = (
        {name: p.grad for name, p in some.named_parameters()} for some in (single, model, near)
    )
    comparisons += compare(0, "loss", {"": losses[0]}, {"": losses[1]}, TOLERANCES[dtype])
    comparisons += compare(0, "gradient", gradients, result, TOLERANCES[dtype], perturbed=near_gradients)
    comparisons += compare(
        0,
        "buffer",
        dict(single.named_buffers()),
        dict(model.named_buffers()),
        TOLERANCES[dtype],
        perturbed=dict(near.named_buffers()),
    )
    parameters = list(model.parameters())
    with torch.no_grad():
        sharded = sum(p.to_local().shape != p.shape for p in parameters)
    noise = frozenset[str]()
    if dtype == torch.float64:
        noise = _beyond_recognition("gradient", gradients, near_gradients) | _beyond_recognition(
            "buffer", dict(single.named_buffers()), dict(near.named_buffers())
        )
    verdict = judge(merge_ranks(comparisons), sharded, len(parameters), noise, disputed)
    return Verdict(**{**vars(verdict), "seconds": time.monotonic() - start})


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


def plan_and_run(rank: int, size: int, architecture: Architecture, layout: str) -> Verdict:
    """Both, where there is nothing else to do meanwhile: the first rank plans for all."""
    planned: list[Any] = [plan_one(rank, size, architecture, [layout]) if rank == 0 else None]
    dist.broadcast_object_list(planned)
    plan = planned[0] if isinstance(planned[0], str) else planned[0][layout]
    if isinstance(planned[0], str) or plan.startswith("!"):
        return Verdict("error", plan)
    return run_one(rank, size, architecture, plan)


def own_rounding(rank: int, size: int, architecture: Architecture) -> dict[str, float]:
    """Label -> how far rounding moves a value on one device, relative to its largest: the larger of the distance
    between float32 and float64, and of what one rounding of the initial weights does in float32."""
    _quiet()
    runs = []
    for dtype, away in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        model = _model(architecture, dtype)
        if away:
            one_rounding_away(model.parameters())
        values = {label("loss", ""): _step(model, _batch(architecture, model, dtype))}
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


def _model(architecture: Architecture, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(SEED)
    model: Any = build(architecture).to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    return model


def _batch(architecture: Architecture, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    batch = batch_of(architecture, model)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(STEP_SEED)
    double = any(p.dtype == torch.float64 for p in model.parameters())
    with Float64() if double else contextlib.nullcontext():
        loss = loss_of(model(**batch), batch)
        loss.backward()
    value = whole(loss)
    assert value is not None
    return value


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, or that of its class scores where it has none."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    scores = getattr(output, "logits", None)
    return nn.functional.cross_entropy(output[0] if scores is None else scores, batch["labels"])


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _quiet() -> None:
    """What transformers has to say about tiny configs is of no use here."""
    warnings.simplefilter("ignore")
    for name in ("transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
