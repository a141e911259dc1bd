"""Forward hooks that read values cost a pipeline its schedule: the first step, and the plan, say which hook it is."""

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


def largest(found: list[float], module: nn.Module, args: Any, output: Tensor) -> None:
    found.append(output.abs().max().item())


def before(module: nn.Module, args: Any) -> None:
    assert args[0].isfinite().all()


def writes(module: nn.Module, args: Any, output: Tensor) -> None:
    torch.add(output.detach(), 1, out=torch.empty_like(output))


def fails(module: nn.Module, args: Any, output: Tensor) -> None:
    if len(output) < 4:
        raise ValueError("four rows")


class Meter:
    """Reads nothing until it is asked."""

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
def test_planning_names_the_hook(kind: str) -> None:
    model = hooked(kind)
    why = LossChecker(model, find_units(model).names).check(((), judged_batch(0))).why
    assert f"(forward {NAMED[kind]} reads values)" in why if kind in NAMED else not why


OTHERWISE = {
    "writes": "hook 'writes' of module 'chain.layers.1' prevents the proof: an operation writes its results to an out= "
    "tensor (add)",
    "fails": "hook 'fails' of module 'chain.layers.1' prevents the proof: with its units skipped it raises ValueError: four rows",
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_hooks_are_not_said_to_read_where_they_do_otherwise(kind: str) -> None:
    model, batch = hooked(kind), judged_batch(0)
    look = LossChecker(model, find_units(model).names).check(((), batch))
    assert OTHERWISE[kind] in look.why and "reads values" not in look.why


def steps(rank: int, size: int, kind: str, loss: str | None) -> tuple[list[list[str]], int]:
    """What three steps warn of, and the microbatches that the last one held."""
    plan = judged_plan("1f1b")
    assert plan.pipeline is not None
    many = pipeline(hooked(kind), plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": loss})))
    told = []
    for rows in (8, 8, 4):  # the last ones are prepared anew
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            many(**{name: t[:rows] for name, t in judged_batch(0).items()}).backward()
        told.append([str(one.message) for one in caught if "pipeline" in str(one.message)])
    return told, call_of(many).last.most_alive


@pytest.mark.parametrize(("kind", "loss"), [("function", None), ("inside", "batch"), ("pre", "microbatches")])
def test_the_first_step_names_the_hook_once(rank_pool: RankPool, kind: str, loss: str | None) -> None:
    (first, held), (second, _) = rank_pool.run(2, steps, kind, loss)
    assert second == [[], [], []] and first[1:] == [[], []] and held == 4
    (told,) = first[0]
    assert "the schedule '1f1b' of this pipeline is lost" in told and NAMED[kind] in told
    assert "reads values" in told and "read them after the step" in told


def test_the_first_step_says_what_else_a_hook_does(rank_pool: RankPool) -> None:
    (((told,), *_), held), _ = rank_pool.run(2, steps, "writes", None)
    assert OTHERWISE["writes"] in told and "reads values" not in told and held == 4


def test_hooks_that_keep_tensors_cost_nothing(rank_pool: RankPool) -> None:
    """The negative control."""
    (told, held), _ = rank_pool.run(2, steps, "tensors", None)
    assert told == [[], [], []] and held == 2
