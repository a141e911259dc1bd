"""Records: what they refuse, and how their targets load or fail to."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright_dtensor.errors import PluginError
from meshwright_dtensor.plugins import RECORD_TYPES, ClusterSpec, PlannerSpec, Registered, StrategySpec


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("acme_target")]:
        del sys.modules[name]


def planner(target: str) -> Registered[PlannerSpec]:
    return Registered(PlannerSpec(name="p", target=target), "acme-plan", "1.2", "acme")


def test_records_are_frozen_values() -> None:
    record, two = ClusterSpec(name="c", target="a:b"), ClusterSpec(name="c", target="a:b")
    assert record == two and hash(record) == hash(two)
    assert record != ClusterSpec(name="c", target="a:c")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.name = "d"  # type: ignore[misc]


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="sumary"):
        ClusterSpec(name="c", target="a:b", sumary="s")  # type: ignore[call-arg]


@pytest.mark.parametrize("record_type", RECORD_TYPES.values(), ids=lambda it: it.__name__)
@pytest.mark.parametrize(
    "target", ["", "math", "math.sqrt", ":sqrt", "math:", "ma th:sqrt", "math:sqrt()", "1a:b"]
)
def test_a_malformed_target_is_refused(record_type: type, target: str) -> None:
    axis = {"axis": "tp"} if record_type is StrategySpec else {}
    with pytest.raises(PluginError, match=r"package\.module:attribute"):
        record_type(name="n", target=target, **axis)
    record_type(name="n", target="math:sqrt", **axis)


@pytest.mark.parametrize("name", ["", " ", " x", "a,b"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match="name"):
        ClusterSpec(name=name, target="a:b")


def test_a_field_that_is_no_text_is_refused() -> None:
    with pytest.raises(PluginError, match="must be text"):
        ClusterSpec(name="c", target=math)  # type: ignore[arg-type]


def test_a_malformed_axis_is_refused() -> None:
    with pytest.raises(PluginError, match="mesh axis"):
        StrategySpec(name="s", axis="t p", target="a:b")


def test_load_returns_the_target() -> None:
    assert planner("math:sqrt").load() is math.sqrt
    assert planner("os.path:join.__name__").load() == "join"


def fails(registered: Registered[PlannerSpec]) -> str:
    with pytest.raises(PluginError) as caught:
        registered.load()
    text = str(caught.value)
    assert "acme-plan" in text and repr(registered.record.target) in text and "\n" not in text
    assert "MESHWRIGHT_DISABLE_PLUGINS=acme-plan" in text
    return text


def test_a_missing_module_is_named() -> None:
    assert "no module 'acme_target_gone'" in fails(planner("acme_target_gone:X"))
    assert "no module 'math.deep'" in fails(planner("math.deep:X"))


def test_a_missing_attribute_is_named_with_a_suggestion() -> None:
    assert "did you mean 'sqrt'" in fails(planner("math:sqrtt"))
    assert "did you mean" not in fails(planner("math:zzzzzzzz"))


def test_a_module_that_needs_another_says_which(modules: Path) -> None:
    (modules / "acme_target_needs.py").write_text("import acme_dependency_gone\n")
    text = fails(planner("acme_target_needs:X"))
    assert "needs the missing module 'acme_dependency_gone'" in text


def test_a_module_that_fails_says_why(modules: Path) -> None:
    (modules / "acme_target_fails.py").write_text("raise RuntimeError('two\\nlines')\n")
    assert "RuntimeError: two lines" in fails(planner("acme_target_fails:X"))


def test_a_record_alone_loads_and_fails_too() -> None:
    assert ClusterSpec(name="c", target="math:pi").load() == math.pi
    with pytest.raises(PluginError, match="cluster 'c'"):
        ClusterSpec(name="c", target="math:nope").load()
