"""Bad plans: each PlanError names field, value, rule and nearest legal value, in one line."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright_dtensor.errors import MeshwrightError, PlanError, UsageError
from meshwright_dtensor.plan import (
    ActivationRule,
    ParallelPlan,
    ParameterRule,
    PipelineRule,
    PlannedCollective,
    Prediction,
    Provenance,
)


def sound(**changes: Any) -> ParallelPlan:
    fields: dict[str, Any] = {
        "world_size": 4,
        "degrees": {"dp": 2, "tp": 2},
        "strategies": {"dp": "data", "tp": "tensor"},
        "parameters": [
            ParameterRule(pattern="*.q_proj.weight", placement={"tp": "S(0)"}),
            ParameterRule(pattern="*.o_proj.weight", placement={"tp": "S(1)", "dp": "I"}),
        ],
        "activations": [
            ActivationRule(
                module="layers.*.mlp", function="linear", occurrence=2, inputs=[{"tp": "S(2)"}, None]
            ),
        ],
        "collectives": [PlannedCollective(axis="tp", kind="all_reduce", nbytes=1024, count=3)],
    }
    return ParallelPlan(**{**fields, **changes})


def error(make: Callable[[], object]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        make()
    text = str(caught.value)
    assert "\n" not in text and text.isascii() and text.isprintable()
    assert caught.value.field in text and caught.value.rule.split(";")[0] in text
    return caught.value


def test_valid_plan_passes() -> None:
    sound().validate_for()
    sound().validate_for(4, ["dp", "tp", "pp"])
    sound(rng="fast").validate_for(4)


def test_streams_of_shards_are_not_in_a_pipeline() -> None:
    pipeline = PipelineRule(stages=(("blocks.0",), ("blocks.1",)), microbatches=2)
    fields: dict[str, Any] = {"world_size": 2, "degrees": {"pp": 2}, "pipeline": pipeline}
    ParallelPlan(**fields).validate_for(2)
    wrong = error(lambda: ParallelPlan(**fields, rng="fast").validate_for(2))
    assert (wrong.field, wrong.nearest) == ("rng", "exact")


@pytest.mark.parametrize(
    ("fields", "field", "nearest"),
    [
        ({"worldsize": 4}, "worldsize", "world_size"),
        ({"sequence_paralel": True}, "sequence_paralel", "sequence_parallel"),
        ({"parameters": [{"pattern": "a", "placment": {}}]}, "parameters[0].placment", "placement"),
        ({"provenance": {"planer": "x"}}, "provenance.planer", "planner"),
        ({"predicted": {"step_second": 1.0}}, "predicted.step_second", "step_seconds"),
        ({"world_size": 0}, "world_size", "1"),
        ({"world_size": 2**63}, "world_size", str(2**63 - 1)),
        ({"degrees": {"tp": 0, "dp": 4}}, "degrees.tp", "1"),
        ({"degrees": {"tp": -2}}, "degrees.tp", "1"),
        ({"degrees": {"t p": 4}}, "degrees.t p", "tp"),
        ({"version": 2}, "version", "1"),
        (
            {"parameters": [{"pattern": "a", "placement": {"tp": "Shard(1)"}}]},
            "parameters[0].placement.tp",
            "S(1)",
        ),
        (
            {"parameters": [{"pattern": "a", "placement": {"tp": "S(-1)"}}]},
            "parameters[0].placement.tp",
            "S(1)",
        ),
        ({"parameters": [{"pattern": "a", "placement": {"tp": "0"}}]}, "parameters[0].placement.tp", "S(0)"),
        ({"parameters": [{"pattern": "a", "placement": {"tp": "R"}}]}, "parameters[0].placement.tp", "I"),
        ({"parameters": [{"pattern": "a", "placement": {"tp": "P"}}]}, "parameters[0].placement.tp", "I"),
        (
            {"parameters": [{"pattern": "a", "placement": {"tp": "S(\u0661)"}}]},
            "parameters[0].placement.tp",
            "S(0)",
        ),
        (
            {"activations": [{"module": "", "function": "f", "inputs": [None, {"tp": "partial"}]}]},
            "activations[0].inputs[1].tp",
            "P",
        ),
        (
            {"activations": [{"module": "", "function": "f", "outputs": [{"tp": "x"}]}]},
            "activations[0].outputs[0].tp",
            "X",
        ),
        (
            {"collectives": [{"axis": "tp", "kind": "allreduce", "nbytes": 1}]},
            "collectives[0].kind",
            "all_reduce",
        ),
    ],
)
def test_wrong_field_is_rejected_at_construction(fields: dict[str, Any], field: str, nearest: str) -> None:
    plan_error = error(lambda: sound(**fields))
    assert plan_error.field == field
    assert plan_error.nearest == nearest


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"world_size": "4"}, "world_size"),
        ({"world_size": 4.0}, "world_size"),
        ({"world_size": True}, "world_size"),
        ({"sequence_parallel": 1}, "sequence_parallel"),
        ({"degrees": [2, 2]}, "degrees"),
        ({"parameters": [{"placement": {}}]}, "parameters[0].pattern"),
        ({"parameters": [{"pattern": ""}]}, "parameters[0].pattern"),
        ({"parameters": {"a": "S(0)"}}, "parameters"),
        ({"activations": [{"module": "", "function": "f", "occurrence": -1}]}, "activations[0].occurrence"),
        ({"predicted": {"step_seconds": -1.0}}, "predicted.step_seconds"),
        ({"predicted": {"step_seconds": float("nan")}}, "predicted.step_seconds"),
        ({"predicted": {"step_seconds": float("inf")}}, "predicted.step_seconds"),
        ({"predicted": {"step_seconds": 1.0, "memory_bytes": {"a": -1}}}, "predicted.memory_bytes.a"),
        ({"strategies": {"tp": ""}}, "strategies.tp"),
    ],
)
def test_wrong_types_and_ranges_are_rejected(fields: dict[str, Any], field: str) -> None:
    assert error(lambda: sound(**fields)).field == field


def test_a_required_field_is_missing() -> None:
    assert error(lambda: ParallelPlan(degrees={})).field == "world_size"  # type: ignore[call-arg]


def test_rules_are_checked_without_a_plan() -> None:
    assert error(lambda: ParameterRule(pattern="a", placement={"tp": "R"})).field == "placement.tp"
    assert error(lambda: PlannedCollective(axis="tp", kind="gather", nbytes=1)).field == "kind"  # type: ignore[arg-type]


def test_field_of_a_later_version_is_rejected() -> None:
    assert (
        error(lambda: ParallelPlan.from_json('{"world_size": 1, "degrees": {}, "zero": 3}')).field == "zero"
    )


@pytest.mark.parametrize(
    ("changes", "world_size", "axes", "field", "value", "rule", "nearest"),
    [
        ({"world_size": 8}, None, None, "degrees", {"dp": 2, "tp": 2}, "product is 4", "dp=4, tp=2"),
        ({"world_size": 7}, None, None, "degrees", {"dp": 2, "tp": 2}, "product is 4", "dp=7, tp=1"),
        ({}, 8, None, "world_size", 4, "the run has 8 ranks", "8 with dp=4, tp=2"),
        ({}, 2, None, "world_size", 4, "the run has 2 ranks", "2 with dp=1, tp=2"),
        ({}, 4, ["dp", "tpp"], "degrees.tp", 2, "no installed strategy", "tpp"),
        ({}, 4, [], "degrees.dp", 2, "pip install meshwright-parallel", None),
        ({"strategies": {"tpp": "tensor"}}, None, None, "strategies.tpp", "tpp", "no axis", "tp"),
        (
            {"parameters": [{"pattern": "a", "placement": {"tpp": "S(0)"}}]},
            None,
            None,
            "parameters[0].placement.tpp",
            "tpp",
            "no axis",
            "tp",
        ),
        (
            {"activations": [{"module": "", "function": "f", "inputs": [None, {"dpp": "I"}]}]},
            None,
            None,
            "activations[0].inputs[1].dpp",
            "dpp",
            "no axis",
            "dp",
        ),
        (
            {"activations": [{"module": "", "function": "f", "outputs": [{"tpx": "I"}]}]},
            None,
            None,
            "activations[0].outputs[0].tpx",
            "tpx",
            "no axis",
            "tp",
        ),
        (
            {"collectives": [{"axis": "cp", "kind": "all_gather", "nbytes": 1}]},
            None,
            None,
            "collectives[0].axis",
            "cp",
            "no axis",
            ...,
        ),
        (
            {"parameters": [{"pattern": "a"}, {"pattern": "b"}, {"pattern": "a"}]},
            None,
            None,
            "parameters[2].pattern",
            "a",
            "parameters[0] has the same pattern",
            None,
        ),
        (
            {"activations": [{"module": "m", "function": "f"}, {"module": "m", "function": "f"}]},
            None,
            None,
            "activations[1]",
            ("m", "f", 0),
            "activations[0] is for the same call",
            None,
        ),
    ],
)
def test_plan_that_does_not_fit_the_run_is_rejected(
    changes: dict[str, Any],
    world_size: int | None,
    axes: list[str] | None,
    field: str,
    value: object,
    rule: str,
    nearest: object,
) -> None:
    plan = sound(**changes)
    plan_error = error(lambda: plan.validate_for(world_size, axes))
    assert (plan_error.field, plan_error.value) == (field, value)
    assert rule in plan_error.rule
    assert nearest is ... or plan_error.nearest == nearest


def test_fields_that_skipped_the_checks_are_checked_on_use() -> None:
    """model_copy takes anything; validate_for does not."""
    assert (
        error(sound().model_copy(update={"degrees": {"dp": 4, "tp": 0}}).validate_for).field == "degrees.tp"
    )
    bad = ParameterRule.model_construct(pattern="a", placement={"tp": "Q"})
    assert (
        error(sound().model_copy(update={"parameters": (bad,)}).validate_for).field
        == "parameters[0].placement.tp"
    )


@given(
    st.dictionaries(st.sampled_from(["pp", "dp", "cp", "ep", "tp"]), st.integers(1, 12), max_size=4),
    st.integers(1, 5000),
)
@settings(max_examples=150, deadline=None, database=None)
def test_the_nearest_degrees_are_legal(degrees: dict[str, int], world_size: int) -> None:
    plan = ParallelPlan(world_size=world_size, degrees=degrees)
    try:
        plan.validate_for()
    except PlanError as plan_error:
        assert plan_error.nearest is not None
        suggested = {axis: int(n) for axis, n in (part.split("=") for part in plan_error.nearest.split(", "))}
        assert not degrees or list(suggested) == list(degrees)
        plan.replace(degrees=suggested).validate_for(world_size)


def test_errors_are_usage_errors_and_travel() -> None:
    plan_error = error(lambda: sound(world_size=0))
    assert (
        isinstance(plan_error, UsageError)
        and isinstance(plan_error, MeshwrightError)
        and plan_error.exit_code == 2
    )
    back = pickle.loads(pickle.dumps(plan_error))
    assert str(back) == str(plan_error) and (back.field, back.rule, back.nearest) == (
        plan_error.field,
        plan_error.rule,
        plan_error.nearest,
    )


def test_a_plan_is_frozen_throughout() -> None:
    plan = sound()
    with pytest.raises(Exception, match="frozen"):
        plan.world_size = 8  # type: ignore[misc]
    for change in (
        lambda: plan.degrees.update(tp=4),
        lambda: plan.degrees.pop("tp"),
        lambda: plan.degrees.__setitem__("tp", 4),
        lambda: plan.parameters[0].placement.clear(),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert plan == sound()


def test_plan_copies_the_arguments_of_its_caller() -> None:
    degrees = {"dp": 2, "tp": 2}
    plan = sound(degrees=degrees)
    degrees["tp"] = 4
    assert plan.degree("tp") == 2


def test_copies_and_pickles_are_equal() -> None:
    plan = sound(predicted=Prediction(step_seconds=0.1), provenance=Provenance(planner="eager"))
    assert copy.deepcopy(plan) == plan == pickle.loads(pickle.dumps(plan)) == copy.copy(plan)
    assert hash(copy.deepcopy(plan)) == hash(plan)
    with pytest.raises(TypeError, match="frozen"):
        pickle.loads(pickle.dumps(plan)).degrees["tp"] = 1


def test_equality_is_by_value_without_the_time() -> None:
    early, late = (sound(provenance=Provenance(planner="p", created=when)) for when in ("monday", "tuesday"))
    assert early == late and hash(early) == hash(late) and early.diff(late) == []
    assert early != sound(provenance=Provenance(planner="q", created="monday"))
    assert sound() != sound(degrees={"tp": 2, "dp": 2})  # the order of axes is the mesh's
    assert sound(strategies={"tp": "tensor", "dp": "data"}) == sound()  # of strategies it says nothing
    assert sound() != "a plan"


def test_states_of_parameters() -> None:
    plan = sound()
    assert plan.axes == ("dp", "tp")
    assert plan.degree("tp") == 2 and plan.degree("pp") == 1
    assert plan.parameter_states("layers.3.q_proj.weight") == {"dp": "I", "tp": 0}
    assert list(plan.parameter_states("layers.3.o_proj.weight").items()) == [("dp", "I"), ("tp", 1)]
    assert plan.parameter_states("norm.weight") == {"dp": "I", "tp": "I"}
    assert plan.parameter_states("layers.3.Q_PROJ.weight") == {"dp": "I", "tp": "I"}  # case counts


def test_the_first_rule_that_matches_wins() -> None:
    rules = [
        ParameterRule(pattern="a.*", placement={"tp": "S(1)"}),
        ParameterRule(pattern="*", placement={"tp": "S(0)"}),
    ]
    assert sound(parameters=rules).parameter_states("a.w")["tp"] == 1
    assert sound(parameters=rules[::-1]).parameter_states("a.w")["tp"] == 0


def test_activation_rules_are_found_by_call() -> None:
    plan = sound()
    assert plan.activation_rule("layers.7.mlp", "linear", 2) is plan.activations[0]
    for call in (("layers.7.mlp", "linear", 1), ("layers.7.mlp", "sdpa", 2), ("layers.7", "linear", 2)):
        assert plan.activation_rule(*call) is None


def test_activation_rules_of_one_forward_are_for_that_forward() -> None:
    rule = {"module": "act", "function": "tanh"}
    first, second = {**rule, "forward": 1, "inputs": [{"tp": "S(0)"}]}, {**rule, "inputs": [{"tp": "I"}]}
    plan = sound(activations=[first, second])
    rules = [plan.activation_rule("act", "tanh", 0, forward) for forward in (0, 1, 2)]
    assert rules == [plan.activations[1], plan.activations[0], plan.activations[1]]
    text = plan.explain()
    assert text.count("tanh #0") == 2 and "tanh #0 of forward 1" in text
    changed = plan.replace(activations=[{**first, "inputs": [{"tp": "S(1)"}]}, second])
    assert any("tanh #0 of forward 1" in line for line in plan.diff(changed))
    with pytest.raises(PlanError, match="is for the same call"):
        sound(activations=[first, first]).validate_for(4)
