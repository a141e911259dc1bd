"""The public names are those of public_names.txt: a change is on purpose, and in the CHANGELOG."""

from __future__ import annotations

from pathlib import Path

from meshwright_dtensor.testing.public_names import check_public_names

MODULES = (
    "meshwright_dtensor",
    "meshwright_dtensor.plugins",
    "meshwright_dtensor.strategy",
    "meshwright_dtensor.cluster",
    "meshwright_dtensor.plan",
    "meshwright_dtensor.schedule",
    "meshwright_dtensor.rules",
)


def test_public_names_are_those_of_the_file() -> None:
    check_public_names(Path(__file__).with_name("public_names.txt"), MODULES)
