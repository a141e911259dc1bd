"""Forward hooks that read values prevent the schedule: the first step and the plan name the hook."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from loss_models import ADDING, judged, judged_batch, judged_plan
from torch import Tensor, nn

from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import call_of, pipeline
from meshwright_pipeline.analysis.loss_preview import LossChecker
from meshwright_pipeline.partition.units import find_units


def watch_for_nan(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.isnan().any():
        raise FloatingPointError(type(module).__name__)


def largest(values: list[float], module: nn.Module, args: Any, output: Tensor) -> None:
    values.append(output.abs().max().item())


def before(module: nn.Module, args: Any) -> None:
    assert args[0].isfinite().all()


def writes(module: nn.Module, args: Any, output: Tensor) -> None:
    torch.add(output.detach(), 1, out=torch.empty_like(output))


def fails(module: nn.Module, args: Any, output: Tensor) -> None:
    if len(output) < 4:
        raise ValueError("four rows")


class Meter:
    """Reads no values until it is asked to."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output.detach().abs().amax())

    def read(self, module: nn.Module, args: Any, output: Tensor) -> None:
        float(output.sum())


def hooked(kind: str) -> nn.Module:
    model = judged(ADDING["mean"])
    layer = model.chain.layers[1]
    if kind == "function":
        layer.register_forward_hook(watch_for_nan)
    elif kind == "inside":
        layer.outer.register_forward_hook(watch_for_nan)
    elif kind == "partial":
        layer.register_forward_hook(functools.partial(largest, []))
    elif kind == "pre":
        layer.register_forward_pre_hook(before)
    elif kind == "method":
        layer.register_forward_hook(Meter().read)
    elif kind in ("writes", "fails"):
        layer.register_forward_hook(globals()[kind])
    elif kind == "tensors":
        layer.register_forward_hook(Meter())
    return model


NAMED = {
    "function": "hook 'watch_for_nan' of module 'chain.layers.1'",
    "inside": "hook 'watch_for_nan' of module 'chain.layers.1.outer'",
    "partial": "hook 'partial' of module 'chain.layers.1'",
    "pre": "pre-hook 'before' of module 'chain.layers.1'",
    "method": "hook 'read' of module 'chain.layers.1'",
}


@pytest.mark.parametrize("kind", [*NAMED, "tensors"])
def test_planning_names_the_hook_that_reads_values(kind: str) -> None:
    model = hooked(kind)
    why = LossChecker(model, find_units(model).names).check(((), judged_batch(0))).why
    assert f"(forward {NAMED[kind]} reads values)" in why if kind in NAMED else not why


OTHERWISE = {
    "writes": "hook 'writes' of module 'chain.layers.1' prevents the proof: an operation writes its results to an out= "
    "tensor (add)",
    "fails": "hook 'fails' of module 'chain.layers.1' prevents the proof: with its units skipped it raises ValueError: four rows",
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_hooks_that_fail_otherwise_are_not_reported_as_reading(kind: str) -> None:
    model, batch = hooked(kind), judged_batch(0)
    look = LossChecker(model, find_units(model).names).check(((), batch))
    assert OTHERWISE[kind] in look.why and "reads values" not in look.why


def steps(rank: int, size: int, kind: str, loss: str | None) -> tuple[list[list[str]], int]:
    """Warnings of three steps, and the number of microbatches held in the last one."""
    plan = judged_plan("1f1b")
    assert plan.pipeline is not None
    many = pipeline(hooked(kind), plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": loss})))
    told = []
    for rows in (8, 8, 4):  # other rows need a new preparation
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            many(**{name: t[:rows] for name, t in judged_batch(0).items()}).backward()
        told.append([str(warning.message) for warning in caught if "pipeline" in str(warning.message)])
    return told, call_of(many).last.most_alive


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loss"), [("function", None), ("inside", "batch"), ("pre", "microbatches")])
def test_first_step_names_the_hook_once(rank_pool: RankPool, kind: str, loss: str | None) -> None:
    (first, held), (second, _) = rank_pool.run(2, steps, kind, loss)
    assert second == [[], [], []] and first[1:] == [[], []] and held == 4
    (told,) = first[0]
    assert "the schedule '1f1b' of this pipeline is lost" in told and NAMED[kind] in told
    assert "reads values" in told and "read them after the step" in told


def test_first_step_reports_other_hook_failures(rank_pool: RankPool) -> None:
    (((told,), *_), held), _ = rank_pool.run(2, steps, "writes", None)
    assert OTHERWISE["writes"] in told and "reads values" not in told and held == 4


def test_hooks_that_keep_tensors_do_not_prevent_the_schedule(rank_pool: RankPool) -> None:
    """The negative control."""
    (told, held), _ = rank_pool.run(2, steps, "tensors", None)
    assert told == [[], [], []] and held == 2
