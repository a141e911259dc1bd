"""The judge fails the runs that it should fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright_parallel.verification.report import Comparison

from .catalogue import Architecture, architectures, build
from .judge import Verdict, decided, judge
from .subject import NotBuildable

GOOD = Comparison(0, "gradient", "a.weight", "float32", 1e-7, 1.0, 1e-5)
BAD = replace(GOOD, name="b.weight", difference=2e-5)
EXACT = Verdict("passed", worst=1e-14)


def test_one_wrong_gradient_is_enough() -> None:
    verdict = judge([GOOD, BAD], 1, 2)
    assert verdict.kind == "wrong" and verdict.wrong == (("gradient b.weight", 2e-5),)
    assert judge([GOOD], 1, 2).passed


def test_nothing_compared_is_an_error() -> None:
    assert judge([], 0, 0).kind == "error"
    assert judge([replace(GOOD, bound=1.0)], 0, 0).kind == "error"


def test_float64_decides_only_where_one_device_is_not_sure_itself() -> None:
    verdict = judge([GOOD, BAD], 1, 2)
    unsure = {"gradient b.weight": 1e-5}
    assert decided(verdict, EXACT, unsure).passed
    assert not decided(verdict, EXACT, {"gradient b.weight": 1e-7}).passed
    assert not decided(verdict, EXACT, {}).passed
    # where rounding turns the sign of one ReLU, it may be another one's
    assert decided(verdict, EXACT, {"gradient b.weight": 1e-7, "gradient a.weight": 3e-5}).passed
    assert not decided(verdict, EXACT, {"gradient b.weight": 1e-7, "buffer a.mean": 3e-5}).passed
    assert not decided(verdict, replace(EXACT, kind="wrong"), unsure).passed


def test_noise_is_held_to_the_largest_value_of_its_kind() -> None:
    small = replace(BAD, scale=1e-9, difference=1e-9)
    label = frozenset({"gradient b.weight"})
    assert judge([GOOD, small], 1, 2, label).passed
    assert not judge([GOOD, small], 1, 2).passed
    assert not judge([GOOD, replace(small, difference=2e-5)], 1, 2, label).passed


def test_the_registries_hold_what_the_table_lists() -> None:
    names = [each.name for each in architectures()]
    assert len(names) == len(set(names)) > 300


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(NotBuildable, match=r"more than 3,000,000|requires|Error"):
        build(Architecture("TimmWrapperForImageClassification", "image"))
