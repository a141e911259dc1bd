"""A part of the architectures, planned: all of them with python -m integration_tests.architectures.planning."""

from __future__ import annotations

import pytest

from .catalogue import Architecture, architectures
from .planning import plan_architecture

EVERY = 37
"""One in so many, across tasks and families."""


@pytest.mark.parametrize("architecture", architectures()[::EVERY], ids=lambda each: each.name)
def test_an_architecture_is_planned(architecture: Architecture) -> None:
    found = plan_architecture(architecture)
    if found.kind in ("not built", "not trained"):
        pytest.skip(found.text)
    assert found.kind == "planned", found.text
