"""Two tensor axes, `tp_outer` outside of `tp`: placed together, carried out as planned, one device's numbers."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_planner_models import build, example
from torch import nn

import meshwright as mw
from meshwright_dtensor.cluster import LinkLevel
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_planner.clusters.registry import LAPTOP_CPU

AXES = ("tp_outer", "tp")


class Mlp(nn.Module):
    """Two blocks with a residual, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.head = nn.Linear(32, 26)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), target)


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with weights from a fixed seed, and its batch."""
    torch.manual_seed(0)
    if name != "mlp":
        return build(name), example()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 32, generator=generator)
    return Mlp(), {"x": x, "target": torch.randint(26, (8,), generator=generator)}


def loss_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.loss


NODES = replace(
    LAPTOP_CPU,
    name="nodes",
    launch_s=0.0,
    links=(LinkLevel("inside", 2, 1e-12, 8e8), LinkLevel("between", 0, 1e-12, 1e8)),
)
"""Two ranks a node, and a slow link between nodes; only bytes count, as they do for models of any size."""


@functools.cache
def planned(name: str, world_size: int = 4, outer: int = 2, slow: bool = False, **options: Any) -> str:
    """The plan of a model on both axes, as JSON."""
    model, batch = made(name)
    pins: dict[str, Any] = {"tp": 2, "degrees": {"tp_outer": outer}, **options}
    result = mw.plan(model, batch, world_size=world_size, cluster=NODES if slow else "laptop-cpu", **pins)
    assert isinstance(result, ParallelPlan)
    return result.to_json()


def counted(events: Any) -> dict[tuple[str, str, str], dict[str, int]]:
    """(axis, phase, kind) -> calls outside of functions that communicate by themselves, and bytes of all."""
    result: dict[tuple[str, str, str], Counter[str]] = {}
    for axis, phase, kind, calls, nbytes in events:
        if axis in AXES:
            entry = result.setdefault((axis, phase, kind), Counter())
            entry["calls"] += calls
            entry["bytes"] += nbytes
    return {key: dict(entry) for key, entry in result.items()}


def step(rank: int, world_size: int, name: str, text: str) -> dict[str, Any]:
    """One step against one device: losses, the worst relative gradient, what was planned and executed on both axes."""
    (reference, batch), (model, _) = made(name), made(name)
    torch.manual_seed(5)
    expected = loss_of(reference(**batch))
    expected.backward()
    plan = ParallelPlan.from_json(text)
    mw.parallelize(model, plan)
    torch.manual_seed(5)
    with communication() as log:
        loss = loss_of(model(**batch))
        loss.backward()
    worst = {
        key: float(
            (p.grad.full_tensor() - single_parameter.grad).abs().max() / single_parameter.grad.abs().max()
        )  # type: ignore[union-attr, operator]
        for (key, p), single_parameter in zip(model.named_parameters(), reference.parameters(), strict=True)
        if single_parameter.grad is not None
    }
    executed = [(e.axis, e.phase, e.kind, int(e.function != "cross_entropy"), e.nbytes) for e in log.events]
    # inside of a function the plan knows the bytes, not in how many pieces they go
    wanted = [
        (c.axis, c.phase, c.kind, c.count * ("cross_entropy" not in c.why), c.count * c.nbytes)
        for c in plan.collectives
    ]
    return {
        "expected": float(expected.detach()),
        "loss": float(loss.detach().full_tensor()),  # type: ignore[operator]
        "worst": max(worst.values()),
        "planned": counted(wanted),
        "executed": counted(executed),
        "parts": {key: p.to_local().numel() / p.numel() for key, p in model.named_parameters()},  # type: ignore[operator]
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "mlp"])
def test_what_is_planned_on_both_axes_is_executed(rank_pool: RankPool, name: str) -> None:
    for result in rank_pool.run(4, step, name, planned(name)):
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
        assert result["worst"] < 1e-5
        assert result["planned"] == result["executed"]
        assert {axis for axis, _, _ in result["executed"]} == set(AXES)
        # the weight of every matmul is in four shards, fused ones too
        whole = [key for key, part in result["parts"].items() if part > 0.25 and "weight" in key]
        norms = ("norm.", ".ln_", ".0.0.", ".1.0.")
        assert all(any(part in key for part in norms) for key in whole), whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_where_bytes_decide_axes_are_placed_differently(rank_pool: RankPool, name: str) -> None:
    """Over a slow outer link the two axes take different dims; that is carried out as planned all the same."""
    text = planned(name, slow=True)
    apart = [r.pattern for r in ParallelPlan.from_json(text).parameters if len(set(r.placement.values())) > 1]
    assert apart
    for result in rank_pool.run(4, step, name, text):
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
        assert result["worst"] < 1e-5 and result["planned"] == result["executed"]


@pytest.mark.slow
def test_a_plan_that_is_changed_communicates_otherwise(rank_pool: RankPool) -> None:
    """What the comparison above is worth: a weight stored otherwise is carried out, and is not what was planned."""
    plan = ParallelPlan.from_json(planned("mlp"))
    changed = tuple(
        ParameterRule(pattern=rule.pattern, placement={"tp_outer": "S(1)", "tp": "S(0)"})
        if rule.placement == {"tp_outer": "S(0)", "tp": "S(0)"} and rule.pattern.endswith("weight")
        else rule
        for rule in plan.parameters
    )
    assert changed != plan.parameters
    result = rank_pool.run(4, step, "mlp", plan.replace(parameters=changed).to_json())[0]
    assert result["worst"] < 1e-5 and result["planned"] != result["executed"]


def verified(rank: int, world_size: int, name: str, text: str) -> tuple[bool, str]:
    """Two steps of SGD under a plan, compared with one device."""
    report = mw.verify(lambda: made(name)[0], made(name)[1], ParallelPlan.from_json(text), steps=2)
    return report.ok, report.render()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("mlp", 4, {"tp": 1, "dp": 2}),
        ("mlp", 4, {"tp": 1, "zero": 3}),
        ("llama", 4, {"tp": 1, "cp": 2}),
        ("mixtral", 4, {"tp": 1, "ep": 2}),
        ("llama", 4, {"tp": 1, "pp": 2, "microbatches": 2}),
        ("llama", 4, {"sequence_parallel": True}),
        ("mlp", 8, {"zero": 2}),
    ],
    ids=["dp", "zero", "cp", "ep", "pp", "sequence", "eight"],
)
def test_it_goes_with_other_axes(
    rank_pool: RankPool, name: str, world_size: int, options: dict[str, Any]
) -> None:
    text = planned(name, world_size, **options)
    plan = ParallelPlan.from_json(text)
    assert plan.degree("tp_outer") == 2 and plan.sequence_parallel == ("sequence_parallel" in options)
    assert any("tp_outer" in rule.placement for rule in plan.parameters)
    for right, report in rank_pool.run(world_size, verified, name, text):
        assert right, report


def saved(rank: int, world_size: int, name: str, text: str, path: str) -> None:
    """A step of AdamW under a plan, and a checkpoint of it."""
    model, batch = made(name)
    mw.parallelize(model, ParallelPlan.from_json(text))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model(**batch)).backward()
    optimizer.step()
    mw.save(path, model=model, optimizer=optimizer).wait()


def loaded(rank: int, world_size: int, name: str, text: str, path: str) -> dict[str, torch.Tensor]:
    """Parameters and states of a checkpoint, loaded under a plan (none: on one device)."""
    torch.manual_seed(17)
    model = made(name)[0]
    if text:
        mw.parallelize(model, ParallelPlan.from_json(text))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mw.load(path, model=model, optimizer=optimizer)
    result = dict(model.named_parameters())
    result |= {f"{k}.avg": optimizer.state[p]["exp_avg"] for k, p in model.named_parameters()}
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach() for k, v in result.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_checkpoints_go_from_two_tensor_axes_to_any_plan_and_back(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    path, text = str(tmp_path / "step"), planned(name)
    rank_pool.run(4, saved, name, text, path)
    single = rank_pool.run(1, loaded, name, "", path)[0]
    start = dict(made(name)[0].named_parameters())
    assert any(not torch.equal(single[key], value) for key, value in start.items())
    for other in (text, planned(name, outer=1, tp=4), planned(name, 2, tp=1)):
        world_size = ParallelPlan.from_json(other).world_size
        for values in rank_pool.run(world_size, loaded, name, other, path):
            assert all(torch.equal(values[key], single[key]) for key in single)


def test_nothing_uses_the_axis_unless_it_is_pinned() -> None:
    model, batch = made("mlp")
    plans = mw.plan(model, batch, world_size=4, cluster="laptop-cpu", top_k=50)
    assert isinstance(plans, list) and all("tp_outer" not in plan.degrees for plan in plans)
    with pytest.raises(UsageError, match="tp_outer=3 is not a legal degree"):
        mw.plan(model, batch, world_size=4, cluster="laptop-cpu", degrees={"tp_outer": 3})


def test_explain_shows_both_axes() -> None:
    plan = ParallelPlan.from_json(planned("mlp"))
    text = str(mw.explain(plan))
    assert "tp_outer 2 x tp 2" in text and "tp_outer forward:" in text and "tp forward:" in text
    assert plan.predicted is not None and plan.predicted.split is not None
    assert set(AXES) <= set(plan.predicted.split.exposed)


def refused(rank: int, world_size: int, text: str) -> str:
    """Why a plan is refused."""
    with pytest.raises(PlanError) as error:
        mw.parallelize(made("mlp")[0], ParallelPlan.from_json(text))
    return str(error.value)


@pytest.mark.slow
def test_a_dim_that_both_axes_do_not_divide_is_refused(rank_pool: RankPool) -> None:
    """26 classes are cut in two, and not in four."""
    plan = ParallelPlan.from_json(planned("mlp"))
    assert plan.parameter_states("head.weight") not in ({}, {"tp_outer": 0, "tp": 0})
    rule = ParameterRule(pattern="head.*", placement={"tp_outer": "S(0)", "tp": "S(0)"})
    wrong = plan.replace(parameters=(rule, *(r for r in plan.parameters if "head" not in r.pattern)))
    for reason in rank_pool.run(4, refused, wrong.to_json()):
        assert "head.weight" in reason and "same length on all ranks" in reason
