"""Run one case in parallel and on one device, on every rank, and tell how far they are apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_parallel.verification.compare import compare as compare_tensors
from meshwright_parallel.verification.compare import one_rounding_away
from meshwright_parallel.verification.report import Comparison


@dataclass
class Difference:
    """What differs on one rank.

    loss: absolute difference. gradients: each against one device. unequal: parameters whose initial values are not
    equal bit for bit.
    """

    loss: float
    single_loss: float
    gradients: list[Comparison] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    degrees: dict[str, int] = field(default_factory=dict)
    sharded: list[str] = field(default_factory=list)

    def wrong(self) -> dict[str, tuple[float, float]]:
        """Name -> difference and largest value of the gradients that differ by more than 1e-5 of their largest value.

        Some gradients are zero but for rounding (the bias of an attention's keys shifts every score of a row alike):
        what one device changes beyond recognition when its weights are one rounding away must be as small in parallel.
        """
        return {c.name: (c.difference, c.scale) for c in self.gradients if not c.ok}


def whole(value: Any) -> torch.Tensor:
    """The plain global tensor of a parameter, gradient or loss, in any layout."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def compare(rank: int, world_size: int, name: str, degrees: dict[str, int]) -> Difference:
    """One forward and backward pass of `CASES[name]`, planned with pinned degrees, against one device."""
    case = CASES[name]
    batch = case.batch()
    torch.manual_seed(3)
    with mw.deferred_init():
        model = case.model()
    return compare_with(model, plan_once(model, batch, **degrees), name)


def compare_plan(rank: int, world_size: int, name: str, plan_json: str) -> Difference:
    """The same under a plan given as JSON."""
    torch.manual_seed(3)
    with mw.deferred_init():
        model = CASES[name].model()
    return compare_with(model, ParallelPlan.from_json(plan_json), name)


def compare_with(model: torch.nn.Module, plan: ParallelPlan, name: str) -> Difference:
    """Apply `plan` to a deferred `model` of case `name`; the generator is as construction left it."""
    case = CASES[name]
    batch = case.batch()
    model = mw.parallelize(model, plan, batch=batch)
    after_init = torch.get_rng_state()

    torch.manual_seed(3)
    single = case.model()
    assert torch.equal(after_init, torch.get_rng_state()), (
        "construction and planning left the generator elsewhere"
    )
    expected_values = dict(single.named_parameters())
    values = dict(model.named_parameters())
    assert values.keys() == expected_values.keys()
    unequal = [key for key, value in values.items() if not torch.equal(whole(value), expected_values[key])]
    sharded = [key for key, value in values.items() if value.detach().to_local().shape != value.shape]

    torch.manual_seed(4)
    expected = single(**batch).loss
    expected.backward()
    expected_state = torch.get_rng_state()
    torch.manual_seed(4)
    loss = model(**batch).loss
    loss.backward()
    assert torch.equal(expected_state, torch.get_rng_state()), "the parallel step drew other random numbers"

    torch.manual_seed(3)
    near = case.model()
    one_rounding_away(near.parameters())
    torch.manual_seed(4)
    near(**batch).loss.backward()

    expected_gradients, gradients, near_gradients = (
        {key: value.grad for key, value in some.named_parameters()} for some in (single, model, near)
    )
    return Difference(
        abs(float(whole(loss)) - float(expected.detach())),
        float(expected.detach()),
        compare_tensors(0, "gradient", expected_gradients, gradients, 1e-5, perturbed=near_gradients),
        unequal,
        dict(plan.degrees),
        sharded,
    )
