"""Sizes of memory as people write them."""

from __future__ import annotations

import pytest

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.utils.bytesize import parse_size


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("1", 1),
        ("2kB", 2000),
        ("1.5 GiB", 3 << 29),
        ("80GB", 80 * 10**9),
        ("3MiB", 3 << 20),
        ("40gib", 40 << 30),
        ("24 GB", 24 * 10**9),
        ("80e9", 80 * 10**9),
        (" 8e10 B ", 80 * 10**9),
        ("16G", 16 * 10**9),
        ("16Gi", 16 << 30),
        (".5kB", 500),
        (80e9, 80 * 10**9),
        (7, 7),
    ],
)
def test_sizes_in_text_and_numbers(value: object, size: int) -> None:
    assert parse_size(value) == size
    assert PlanRequest(memory_limit=value).memory_limit == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    ["", "GB", "-1GB", "1 parsec", "nan", "inf", "0", "1e40", "1e999", -1, 0, True, [1], float("nan")],
)
def test_values_that_are_no_size_are_rejected(value: object) -> None:
    with pytest.raises(UsageError, match=r"memory_limit=.*'16GB'"):
        PlanRequest(memory_limit=value)  # type: ignore[arg-type]


def test_a_wrong_unit_is_named() -> None:
    with pytest.raises(UsageError, match="'GiBs' is no unit of memory; did you mean 'GiB'"):
        parse_size("40 GiBs", "memory_limit")
