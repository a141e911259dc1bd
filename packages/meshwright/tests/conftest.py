"""Fixtures for the tests of this package."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _first_party_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the sample plugin out where an editable environment has it: it adds a mesh axis to plans."""
    monkeypatch.setenv("MESHWRIGHT_DISABLE_PLUGINS", "meshwright-sample-vocabulary")
