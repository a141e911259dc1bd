"""A few inputs of `python -m integration_tests.fuzzing`, and that it sees what is wrong."""

from __future__ import annotations

import pytest

from .formats import Format, formats
from .sweep import MEMORY, fuzz

INPUTS = 150


@pytest.mark.slow
def test_changed_files_give_our_errors() -> None:
    with formats() as all_formats:
        for name, form in all_formats.items():
            outcome = fuzz(form, INPUTS, seed=7)
            assert not outcome.wrong, (name, outcome.wrong)
            assert outcome.counts["refused"] > INPUTS // 10, name


def _reader(kind: str) -> Format:
    def read(data: bytes) -> None:
        if data == b"changed":
            if kind == "KeyError":
                raise KeyError("x")
            bytearray(2 * MEMORY)

    return Format((b"right",), lambda choose: b"changed", read)


@pytest.mark.parametrize("kind", ["KeyError", "MemoryError"])
def test_other_errors_are_seen(kind: str) -> None:
    (name,) = fuzz(_reader(kind), 1, 0).wrong
    assert name.startswith(kind)
