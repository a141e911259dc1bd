"""Plans as files: round trips, readable and stable text, and PlanError for every other file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan

RELAXED = settings(max_examples=100, deadline=None, database=None)

names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=12)
shards = st.integers(0, 7).map(lambda dim: f"S({dim})")
counts = st.integers(0, 2**63 - 1)
seconds = st.floats(0, 1e6, allow_nan=False)


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    axes = draw(st.lists(st.sampled_from(["pp", "dp", "cp", "ep", "tp", "mine"]), unique=True, max_size=4))
    degrees = {axis: draw(st.integers(1, 6)) for axis in axes}
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    axis = st.sampled_from(axes) if axes else st.just("unused")

    def over_axes(values: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, str]]:
        return st.dictionaries(axis, values, max_size=len(axes))  # always empty where there are no axes

    value_states = st.one_of(st.none(), over_axes(st.one_of(st.sampled_from(["I", "X", "P"]), shards)))
    parameter = st.fixed_dictionaries(
        {"pattern": names, "placement": over_axes(st.one_of(st.just("I"), shards))}
    )
    activation = st.fixed_dictionaries(
        {"module": st.one_of(st.just(""), names), "function": names, "occurrence": st.integers(0, 9)},
        optional={
            "forward": st.integers(0, 3),
            "inputs": st.lists(value_states, max_size=3),
            "outputs": st.lists(value_states, max_size=2),
        },
    )
    collective = st.fixed_dictionaries(
        {
            "axis": axis,
            "kind": st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
            "nbytes": counts,
            "count": st.integers(1, 1000),
            "phase": st.sampled_from(["forward", "backward"]),
            "why": st.text(max_size=10),
        }
    )
    prediction = st.fixed_dictionaries(
        {"step_seconds": seconds},
        optional={"compute_seconds": seconds, "memory_bytes": st.dictionaries(names, counts, max_size=3)},
    )
    provenance = st.fixed_dictionaries(
        {},
        optional={
            "planner": names,
            "versions": st.dictionaries(names, names, max_size=2),
            "created": names,
            "notes": st.lists(st.text(max_size=8), max_size=2),
        },
    )
    fields: dict[str, Any] = {
        "world_size": world_size,
        "degrees": degrees,
        "strategies": draw(st.dictionaries(axis, names, max_size=len(axes))),
        "sequence_parallel": draw(st.booleans()),
        "parameters": draw(st.lists(parameter, max_size=4, unique_by=lambda rule: str(rule["pattern"]))),
        "activations": draw(
            st.lists(
                activation,
                max_size=3,
                unique_by=lambda rule: (rule["module"], rule["function"], rule["occurrence"]),
            )
        ),
        "predicted": draw(st.one_of(st.none(), prediction)),
        "collectives": draw(st.lists(collective, max_size=3)) if axes else [],
        "provenance": draw(provenance),
    }
    return ParallelPlan(**fields)


@pytest.mark.slow
@given(plans())
@RELAXED
def test_a_plan_survives_json(plan: ParallelPlan) -> None:
    text = plan.to_json()
    back = ParallelPlan.from_json(text)
    assert back == plan and hash(back) == hash(plan)
    assert back.axes == plan.axes
    assert back.to_json() == text
    assert ParallelPlan.from_json(text.encode()) == plan
    assert json.loads(text)["world_size"] == plan.world_size  # any JSON reader reads it
    assert text.endswith("}\n") and text.isascii()
    plan.validate_for(plan.world_size, plan.axes)


@pytest.mark.slow
@given(plans(), plans())
@RELAXED
def test_diff_is_empty_exactly_for_equal_plans(plan: ParallelPlan, other: ParallelPlan) -> None:
    assert plan.diff(plan) == []
    assert plan.diff(ParallelPlan.from_json(plan.to_json())) == []
    assert (plan.diff(other) == []) == (plan == other) == (other.diff(plan) == [])
    assert all("\n" not in line for line in plan.diff(other))


@given(plans())
@settings(RELAXED, max_examples=40)
def test_explain_takes_any_plan(plan: ParallelPlan) -> None:
    text = plan.explain()
    assert text.startswith("mesh: ") and text.endswith("\n")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = sorted(ParallelPlan.model_fields)


def only_plan_errors(text: str | bytes) -> None:
    """Reading either works, and then everything does, or is a PlanError of one printable line."""
    try:
        plan = ParallelPlan.from_json(text)
    except PlanError as error:
        assert str(error).isascii() and "\n" not in str(error)
        return
    assert ParallelPlan.from_json(plan.to_json()) == plan
    plan.explain()
    try:
        plan.validate_for(8, ["dp", "tp"])
    except PlanError as error:
        assert "\n" not in str(error)


@given(st.one_of(st.text(max_size=40), st.binary(max_size=40)))
@RELAXED
def test_fuzzed_text_gives_only_plan_errors(text: str | bytes) -> None:
    only_plan_errors(text)


@given(json_values)
@RELAXED
def test_fuzzed_json_gives_only_plan_errors(value: object) -> None:
    only_plan_errors(json.dumps(value))


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
@RELAXED
def test_fuzzed_fields_give_only_plan_errors(value: dict[str, object]) -> None:
    only_plan_errors(json.dumps({"world_size": 4, "degrees": {"tp": 4}} | value))


@pytest.mark.slow
@given(plans(), st.data())
@settings(RELAXED, max_examples=200)
def test_plan_with_one_corrupt_value_gives_only_plan_errors(plan: ParallelPlan, data: st.DataObject) -> None:
    document = json.loads(plan.to_json())
    here: Any = document
    while True:
        places = list(here) if isinstance(here, dict) else list(range(len(here)))
        place = data.draw(st.sampled_from(places))
        if isinstance(here[place], (dict, list)) and here[place] and data.draw(st.booleans()):
            here = here[place]
            continue
        break
    here[place] = data.draw(json_values)
    only_plan_errors(json.dumps(document))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '{"world_size": 1, "degrees": {}',
        '{"world_size": 1, "degrees": {}} trailing',
        '{"world_size": 1, "world_size": 1, "degrees": {}}',
        '{"world_size": 1, "degrees": {"tp": 1, "tp": 1}}',
        '{"world_size": NaN, "degrees": {}}',
        '{"world_size": 1, "degrees": {}, "predicted": {"step_seconds": 1e999}}',
        '{"world_size": 1' + "0" * 5000 + ', "degrees": {}}',
        '{"world_size": 1, "degrees": {}, "\\ud800": 1}',
        '{"world_size": 1, "degrees": {"\\ud800": 1}}',
        '{"world_size": 1, "degrees": {}, "provenance": {"planner": "\\ud800"}}',
        "[" * 100_000,
        '{"a":' * 900 + "1" + "}" * 900,
        '{"world_size": 1, "degrees": ' + "[" * 900 + "]" * 900 + "}",
        b"\xff\xfe{}",
    ],
)
def test_json_that_is_no_plan_is_a_plan_error(text: str | bytes) -> None:
    with pytest.raises(PlanError) as caught:
        ParallelPlan.from_json(text)
    assert "\n" not in str(caught.value) and str(caught.value).isascii() and len(str(caught.value)) < 600


def test_byte_order_mark_is_accepted() -> None:
    assert ParallelPlan.from_json(b'\xef\xbb\xbf{"world_size": 1, "degrees": {}}').world_size == 1


def example() -> ParallelPlan:
    return ParallelPlan.from_dict(
        {
            "world_size": 8,
            "degrees": {"dp": 2, "tp": 4},
            "strategies": {"tp": "tensor", "dp": "data"},
            "parameters": [
                {"pattern": "*.q_proj.weight", "placement": {"tp": "S(0)"}},
                {"pattern": "*.o_proj.weight", "placement": {"tp": "S(1)", "dp": "I"}},
            ],
            "activations": [{"module": "layers.*", "function": "linear", "inputs": [{"tp": "S(2)"}, None]}],
            "predicted": {
                "step_seconds": 0.25,
                "compute_seconds": 0.125,
                "memory_bytes": {"parameters": 20, "activations": 10},
            },
        }
    )


def test_the_text_is_readable() -> None:
    """Written out, so that a change of form is seen: files under version control would all change with it."""
    assert example().to_json() == (
        "{\n"
        '  "version": 1,\n'
        '  "world_size": 8,\n'
        '  "degrees": {"dp": 2, "tp": 4},\n'
        '  "strategies": {"dp": "data", "tp": "tensor"},\n'
        '  "sequence_parallel": false,\n'
        '  "parameters": [\n'
        '    {"pattern": "*.q_proj.weight", "placement": {"tp": "S(0)"}},\n'
        '    {"pattern": "*.o_proj.weight", "placement": {"dp": "I", "tp": "S(1)"}}\n'
        "  ],\n"
        '  "activations": [\n'
        '    {"module": "layers.*", "function": "linear", "occurrence": 0, "inputs": [{"tp": "S(2)"}, null]}\n'
        "  ],\n"
        '  "recompute": [],\n'
        '  "compile": [],\n'
        '  "rng": "exact",\n'
        '  "predicted": {\n'
        '    "step_seconds": 0.25,\n'
        '    "compute_seconds": 0.125,\n'
        '    "communication_seconds": 0.0,\n'
        '    "memory_bytes": {"activations": 10, "parameters": 20}\n'
        "  },\n"
        '  "collectives": [],\n'
        '  "provenance": {"versions": {}, "notes": []}\n'
        "}\n"
    )


def test_plan_round_trips_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    example().save(path)
    assert ParallelPlan.load(path) == example() == ParallelPlan.load(str(path))
    assert path.read_text() == example().to_json()
    example().replace(sequence_parallel=True).save(path)  # over the old one
    assert ParallelPlan.load(path).sequence_parallel
    assert os.listdir(tmp_path) == ["plan.json"]


def test_every_truncation_is_a_plan_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = example().to_json()
    for length in range(len(text) - 1):
        path.write_text(text[:length])
        if length == len(text.rstrip()):
            continue
        with pytest.raises(PlanError) as caught:
            ParallelPlan.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_files_are_plan_errors_that_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(os.urandom(64))
    for path in (tmp_path, tmp_path / "missing.json", tmp_path / "binary", tmp_path / "binary" / "below"):
        with pytest.raises(PlanError) as caught:
            ParallelPlan.load(path)
        assert str(path) in str(caught.value)
    with pytest.raises(PlanError):
        ParallelPlan.load("a\0b")


def test_a_plan_that_cannot_be_written_is_a_plan_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "plan.json", tmp_path):
        with pytest.raises(PlanError) as caught:
            example().save(path)
        assert str(path) in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_typo_in_a_file_names_file_field_and_nearest(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(example().to_json().replace('"placement"', '"placment"'))
    with pytest.raises(PlanError) as caught:
        ParallelPlan.load(path)
    text = str(caught.value)
    assert (
        str(path) in text and "parameters[0].placment" in text and text.endswith("nearest legal: placement")
    )
