"""The public names are those of public_names.txt: a change is on purpose, and in the CHANGELOG."""

from __future__ import annotations

from pathlib import Path

from meshwright_dtensor.testing.public_names import check_public_names

MODULES = ("meshwright_pipeline",)


def test_public_names_are_those_of_the_file() -> None:
    check_public_names(Path(__file__).with_name("public_names.txt"), MODULES)
