"""verify(): a right run passes, and every kind of wrong result is reported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from parallel_models import VOCABULARY, WIDTH, Language, batch_of, make, plan_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright_dtensor.errors import UsageError, VerificationError
from meshwright_dtensor.testing.on_device import random_state
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import VerificationReport, verify
from meshwright_parallel.engine.grad_reduction import reduction_of
from meshwright_parallel.verification.compare import compare, one_rounding_away
from meshwright_parallel.verification.report import Comparison


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def checked(rank: int, world_size: int, degrees: dict[str, int]) -> VerificationReport:
    torch.manual_seed(3)
    state = random_state()
    report = verify(
        partial(make, 0.2, torch.float64), batch_of(), plan_of(degrees=degrees), optimizer=adamw, max_norm=0.5
    )
    assert torch.equal(random_state(), state)
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "degrees"), [(1, {"dp": 1}), (2, {"dp": 2}), (4, {"dp": 2, "tp": 2})])
def test_right_run_passes(rank_pool: RankPool, world_size: int, degrees: dict[str, int]) -> None:
    reports = rank_pool.run(world_size, checked, degrees)
    report = reports[0]
    assert all(r == report for r in reports)
    report.raise_if_bad()
    assert report.ok
    kinds = {c.kind for c in report.comparisons}
    assert kinds == {"loss", "gradient", "parameter", "buffer", "state"}
    names = {c.name for c in report.comparisons if c.kind == "gradient"}
    trained = {n for n, p in Language().named_parameters() if p.requires_grad and not n.startswith("unused")}
    assert names == trained  # an unused layer has no gradient on either side
    assert {"embed.weight/exp_avg", "embed.weight/exp_avg_sq"} <= {c.name for c in report.comparisons}
    assert [c for c in report.comparisons if c.step == -1]  # initial values, bit for bit
    text = report.render()
    assert "the same as one device" in text
    shown = replace(report, comparisons=tuple(c for c in report.comparisons if "embed.weight" in c.name))
    assert "embed.weight = head.weight" in shown.render(width=200)  # a tied weight by all its names
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is True and data["tied"] == {"embed.weight": ["head.weight"]}
    assert data["tensors"] == len(report.comparisons)


class Sabotaged(Language):
    """Breaks the run in one of several ways, once it is parallel."""

    how = ""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        engine = reduction_of(self)
        if self.how == "engine" and engine is not None:
            engine.remove()
        out = super().forward(ids, labels)
        if self.how == "loss" and engine is not None:
            out = out * (1 + 1e-3)
        if self.how == "none":
            return {"something": out}
        return out


class OneRankWrong(Language):
    """A gradient differs on the last rank only."""

    def __init__(self) -> None:
        super().__init__()
        # in the forward of a parallel model every rank sees one device
        self.rank = torch.distributed.get_rank()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if reduction_of(self) is not None and self.rank == 1:
            with torch.no_grad():
                self.blocks[0].norm.bias.to_local().add_(1e-2)
        return super().forward(ids, labels)


def sabotaged(rank: int, world_size: int, how: str) -> VerificationReport:
    Sabotaged.how = how
    kind = OneRankWrong if how == "rank" else Sabotaged
    return verify(kind, batch_of(), plan_of(degrees={"dp": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["engine", "loss", "rank"])
def test_wrong_run_fails(rank_pool: RankPool, how: str) -> None:
    reports = rank_pool.run(2, sabotaged, how)
    for report in reports:
        assert report == reports[0]
        assert not report.ok
        with pytest.raises(VerificationError, match="worst: "):
            report.raise_if_bad()
        assert "DIFFER" in report.render()
    failed = {(c.kind, c.name) for c in reports[0].failures if c.step == 0}
    if how == "engine":
        assert ("loss", "") not in failed  # the loss is right, the gradients are not
        gradients = {c.name for c in reports[0].comparisons if c.kind == "gradient"}
        assert {("gradient", name) for name in gradients} <= failed
    if how == "loss":
        assert ("loss", "") in failed


def test_model_without_loss_raises(rank_pool: RankPool) -> None:
    with pytest.raises(UsageError, match="no loss was found"):
        rank_pool.run(2, sabotaged, "none")


def relative(expected: Any, actual: Any) -> Comparison:
    (result,) = compare(0, "gradient", {"w": expected}, {"w": actual}, None)
    return result


def test_compare_is_relative_to_each_tensor() -> None:
    big = torch.tensor([1000.0, 1.0])
    assert relative(big, big + torch.tensor([0.005, 0.0])).relative == pytest.approx(5e-6, rel=0.1)
    assert relative(big, big + torch.tensor([0.005, 0.0])).ok
    assert not relative(big, big + torch.tensor([0.02, 0.0])).ok
    assert relative(big, None).difference == math.inf
    assert relative(None, big).note == "missing on one device"
    assert relative(big, torch.tensor([1000.0, math.nan])).difference == math.inf
    assert relative(torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf])).ok
    assert not relative(torch.tensor([math.inf]), torch.tensor([-math.inf])).ok
    assert not relative(big, big.double()).ok
    assert not relative(big, big[:1]).ok
    assert relative(torch.zeros(3), torch.zeros(3)).ok
    assert not relative(torch.zeros(3), torch.ones(3)).ok
    # a small gradient is compared relative to itself, not to a larger one
    expected = {"a": torch.ones(1), "b": torch.tensor([1e-4])}
    actual = {"a": torch.ones(1), "b": torch.tensor([1.001e-4])}
    assert [c.ok for c in compare(0, "gradient", expected, actual, None)] == [True, False]


def test_unknown_keyword_and_zero_steps_raise() -> None:
    with pytest.raises(TypeError):
        verify(Language, batch_of(), plan_of(), step=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="steps=0"):
        verify(Language, batch_of(), plan_of(), steps=0)


def test_noise_is_noise_on_one_device_and_stays_small() -> None:
    expected = {"w": torch.ones(3), "b": torch.tensor([3e-8, -2e-8, 1e-8])}
    shaken = {"w": torch.ones(3), "b": torch.tensor([-1e-8, 3e-8, 2e-8])}

    def check(bias: list[float], perturbed: Any = shaken) -> Comparison:
        actual = {"w": torch.ones(3), "b": torch.tensor(bias)}
        results = compare(0, "gradient", expected, actual, None, perturbed=perturbed)
        assert results[0].measured and results[0].ok
        return results[1]

    other = check([-2e-8, 1e-8, 4e-8])
    assert other.ok and not other.measured and other.note == "rounding noise only"
    assert not check([1e-5, 0.0, 0.0]).ok  # too large for noise
    assert not check([math.nan, 0.0, 0.0]).ok
    steady = check([3.1e-8, -2e-8, 1e-8], perturbed=expected)
    assert steady.measured and not steady.ok  # one device determines it, so it is compared
    large = {"w": torch.ones(3), "b": torch.tensor([3e-3, -2e-3, 1e-3])}
    chaotic = {"w": torch.ones(3), "b": -large["b"]}
    wrong = compare(0, "gradient", large, {"w": torch.ones(3), "b": -large["b"]}, None, perturbed=chaotic)
    assert not wrong[1].ok  # too large on one device to be noise


class Attention(nn.Module):
    """The gradient of the keys' bias is rounding noise; that of `faint` is far smaller than the others.

    In parallel, the gradient of the parameter `which` can be scaled.
    """

    def __init__(self, which: str = "", factor: float = 1.0) -> None:
        super().__init__()
        self.which, self.factor = which, factor
        self.embed = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.faint = nn.Linear(WIDTH, WIDTH, bias=False)

    def of(self, name: str) -> torch.Tensor:
        parameter = self.get_parameter(name)
        if name == self.which and isinstance(parameter, DTensor):
            return parameter.detach() + (parameter - parameter.detach()) * self.factor
        return parameter

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embed = self.of("embed")
        h = F.embedding(ids, embed)
        q, k, v = (
            F.linear(h, self.of(f"{n}.weight"), self.of(f"{n}.bias")) for n in ("query", "key", "value")
        )
        h = h + F.scaled_dot_product_attention(q, k, v)
        h = h + F.linear(h, self.of("faint.weight")) * 1e-5
        return F.cross_entropy(F.linear(h, embed).flatten(0, 1), labels.flatten(), ignore_index=-100)


class SwapsRows(torch.optim.SGD):
    """Swaps two rows of the first parameter after a step, in parallel only."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        weight = self.param_groups[0]["params"][0]
        if isinstance(weight, DTensor):
            with torch.no_grad():
                local = weight.to_local()
                local[-2:] = local[-2:].flip(0)
        return result


class ScalesMoment(torch.optim.AdamW):
    """Scales the second moment of the first parameter, in parallel only."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        weight = self.param_groups[0]["params"][0]
        if isinstance(weight, DTensor):
            self.state[weight]["exp_avg_sq"].mul_(1.001)
        return result


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=5e-4),
    "swapped": partial(SwapsRows, lr=0.05, momentum=0.9),
    "moment": partial(ScalesMoment, lr=5e-4),
}


def spoilt(rank: int, world_size: int, how: str, which: str = "", factor: float = 1.0) -> VerificationReport:
    """Three steps of `Attention`, with at most one fault in parallel."""
    batch = batch_of(rows=4)
    batch["ids"] = batch["ids"].remainder(VOCABULARY - 2)
    model = partial(Attention, which, factor)
    return verify(model, batch, plan_of(degrees={"dp": 2}), steps=3, optimizer=OPTIMIZERS[how])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sgd", "adamw"])
def test_only_noise_and_adaptive_steps_are_no_measure(rank_pool: RankPool, how: str) -> None:
    report = rank_pool.run(2, spoilt, how)[0]
    report.raise_if_bad()
    unmeasured = {(c.kind, c.name) for c in report.comparisons if not c.measured}
    noise = {("gradient", "key.bias"), ("parameter", "key.bias")}
    moments = {("state", f"key.bias/{key}") for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
    parameters = {("parameter", name) for name, _ in Attention().named_parameters()}
    assert ("gradient", "key.bias") in unmeasured
    assert unmeasured <= noise | moments | (parameters if how == "adamw" else set())
    assert (parameters <= unmeasured) == (how == "adamw")
    assert all(c.tolerance <= 1e-5 for c in report.comparisons)
    data = report.to_dict()
    assert data["no_measure"] == sum(not c.measured for c in report.comparisons)
    assert "no measure" in report.render()


@pytest.mark.slow
@pytest.mark.parametrize("which", [name for name, _ in Attention().named_parameters() if name != "key.bias"])
def test_one_wrong_gradient_fails_however_small(rank_pool: RankPool, which: str) -> None:
    report = rank_pool.run(2, spoilt, "sgd", which, 1.001)[0]
    first = {(c.kind, c.name) for c in report.failures if c.step == 0}
    assert ("state", f"{which}/momentum_buffer") in first
    assert {name for kind, name in first if kind == "gradient"} == {which}


@pytest.mark.slow
def test_swapped_rows_of_a_parameter_fail(rank_pool: RankPool) -> None:
    first = {(c.kind, c.name) for c in rank_pool.run(2, spoilt, "swapped")[0].failures if c.step == 0}
    assert first == {("parameter", "embed")}


def test_wrong_moment_fails(rank_pool: RankPool) -> None:
    first = {(c.kind, c.name) for c in rank_pool.run(2, spoilt, "moment")[0].failures if c.step == 0}
    assert first == {("state", "embed/exp_avg_sq")}


def test_states_are_compared_per_key() -> None:
    expected = {"a/exp_avg": torch.tensor([1e-4]), "a/step": torch.tensor(2.0)}
    actual = {"a/exp_avg": torch.tensor([2e-4]), "a/step": torch.tensor(2.0)}
    assert [c.ok for c in compare(0, "state", expected, actual, None)] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_perturbation_is_one_rounding_in_every_dtype(dtype: torch.dtype) -> None:
    values = torch.linspace(1.0, 1.5, 64, dtype=dtype)
    perturbed = values.clone()
    one_rounding_away([perturbed])
    roundings = (perturbed - values).abs() / torch.finfo(dtype).eps
    assert roundings.count_nonzero() > 60 and roundings.max() <= 2
