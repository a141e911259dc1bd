"""What `diff` and `explain` say."""

from __future__ import annotations

import pytest

from meshwright_dtensor.plan import (
    ActivationRule,
    ParallelPlan,
    ParameterRule,
    PlannedCollective,
    Prediction,
    Provenance,
)


@pytest.fixture
def plan() -> ParallelPlan:
    return ParallelPlan(
        world_size=8,
        degrees={"dp": 2, "tp": 4},
        strategies={"dp": "data", "tp": "tensor"},
        sequence_parallel=True,
        parameters=[
            ParameterRule(pattern="*.q_proj.weight", placement={"tp": "S(0)"}),
            ParameterRule(pattern="embed[0].*", placement={"tp": "S(1)"}),
        ],
        activations=[
            ActivationRule(
                module="layers.*.mlp",
                function="linear",
                occurrence=2,
                inputs=[{"tp": "S(2)"}, None],
                outputs=[{"dp": "S(0)", "tp": "P"}],
            )
        ],
        predicted=Prediction(
            step_seconds=0.0123,
            compute_seconds=0.01,
            communication_seconds=2.5e-6,
            memory_bytes={"parameters": 3 * 2**30, "gradients": 1000, "total": 5 * 2**30},
        ),
        collectives=[
            PlannedCollective(axis="tp", kind="all_reduce", nbytes=2**20, count=3),
            PlannedCollective(axis="tp", kind="all_reduce", nbytes=2**20, count=1, module="norm"),
        ],
        provenance=Provenance(
            planner="eager",
            versions={"torch": "2.13.0"},
            cluster="dgx-h100",
            created="2026-01-01",
            notes=["compute bound"],
        ),
    )


def test_diff_lists_the_changes(plan: ParallelPlan) -> None:
    changed = plan.replace(
        world_size=16,
        degrees={"dp": 4, "tp": 4},
        parameters=[
            ParameterRule(pattern="*.q_proj.weight", placement={"tp": "S(1)", "dp": "S(0)"}),
            ParameterRule(pattern="*.k_proj.weight"),
        ],
        predicted=None,
    )
    lines = plan.diff(changed)
    assert "world_size: 8 -> 16" in lines
    assert "degrees.dp: 2 -> 4" in lines
    assert 'parameters "*.q_proj.weight".placement.tp: "S(0)" -> "S(1)"' in lines
    assert 'parameters "*.q_proj.weight".placement.dp: added "S(0)"' in lines
    assert 'parameters: removed {"pattern": "embed[0].*", "placement": {"tp": "S(1)"}}' in lines
    assert 'parameters: added {"pattern": "*.k_proj.weight", "placement": {}}' in lines
    assert sum(line.startswith("predicted: removed") for line in lines) == 1
    assert len(lines) == 7


def test_diff_sees_order_where_it_counts(plan: ParallelPlan) -> None:
    assert plan.diff(plan.replace(parameters=plan.parameters[::-1])) == [
        'parameters: order "*.q_proj.weight", "embed[0].*" -> "embed[0].*", "*.q_proj.weight"'
    ]
    assert plan.diff(plan.replace(degrees={"tp": 4, "dp": 2})) == ["degrees: order dp, tp -> tp, dp"]


def test_diff_of_repeated_patterns_goes_by_place(plan: ParallelPlan) -> None:
    plan_with_two_rules = plan.replace(parameters=[ParameterRule(pattern="a"), ParameterRule(pattern="a")])
    other = plan.replace(
        parameters=[ParameterRule(pattern="a"), ParameterRule(pattern="a", placement={"tp": "S(0)"})]
    )
    assert plan_with_two_rules.diff(other) == ['parameters[1].placement.tp: added "S(0)"']


def test_explain_shows_every_field(plan: ParallelPlan) -> None:
    text = plan.explain()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "mesh: dp 2 x tp 4 = 8 ranks"
    for expected in (
        "dp: data",
        "tp: tensor",
        "sequence parallel",
        "*.q_proj.weight I S(0)",
        "embed[0].* I S(1)",  # brackets are text, not rich's markup
        "layers.*.mlp linear #2 tp=S(2); any dp=S(0),tp=P",
        "tp all_reduce forward 4 4.0 MiB",
        "predicted step: 12.3 ms (compute 10 ms, communication 2.5 us)",
        "predicted memory of the fullest rank at its peak: 5.0 GiB (parameters 3.0 GiB, gradients 1000 B)",
        "provenance: planner eager, cluster dgx-h100, created 2026-01-01, torch 2.13.0",
        "compute bound",
    ):
        assert expected in lines, text
    assert "\x1b" not in text and all(len(line) <= 110 for line in text.splitlines())


def test_explain_leaves_out_empty_memory_parts(plan: ParallelPlan) -> None:
    """Activations of a step whose memory is fullest while the optimizer runs are none then, and that is said."""

    def said(memory: dict[str, int]) -> str:
        assert plan.predicted is not None
        other = plan.replace(predicted=plan.predicted.model_copy(update={"memory_bytes": memory}))
        return " ".join(other.explain().split())

    zero = said({"parameters": 1000, "buffers": 0, "activations": 0, "total": 1000})
    assert "(parameters 1000 B; no activations are kept then, as while the optimizer steps)" in zero
    assert "0 B," not in zero
    unknown = said({"parameters": 1000, "total": 1000})
    assert "(parameters 1000 B)" in unknown and "no activations" not in unknown


def test_explain_fits_the_width_and_loses_nothing(plan: ParallelPlan) -> None:
    pattern = "model.layers.*." + "very_long_name." * 6 + "weight"
    text = plan.replace(parameters=[ParameterRule(pattern=pattern)]).explain(width=60)
    assert all(len(line) <= 60 for line in text.splitlines())
    cells = "".join(line.split(" I ")[0].strip() for line in text.splitlines())
    assert pattern in cells


def test_explain_of_a_bare_plan() -> None:
    text = ParallelPlan(world_size=1, degrees={}).explain()
    assert text.startswith("mesh: 1 rank\n")
    assert "every parameter is whole on all ranks" in text and "written by hand" in text


def test_equal_plans_are_explained_alike(plan: ParallelPlan) -> None:
    back = ParallelPlan.from_json(plan.to_json())
    assert back.explain() == plan.explain()
    assert plan.replace(sequence_parallel=False).explain() != plan.explain()


def test_total_memory_is_given_or_summed() -> None:
    assert Prediction(step_seconds=1.0, memory_bytes={"a": 2, "b": 3}).total_bytes == 5
    assert Prediction(step_seconds=1.0, memory_bytes={"a": 2, "b": 3, "total": 4}).total_bytes == 4
