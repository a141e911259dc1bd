"""How many cores there are."""

from __future__ import annotations

import os

import pytest

from meshwright_dtensor.utils.cpu import usable_cores


def test_usable_cores_respect_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as off Linux
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cores() == 12
