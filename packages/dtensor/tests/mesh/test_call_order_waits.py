"""A call that the other ranks do not make: how long it is waited for, and that its error is known for one of a lost rank."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh import call_order
from meshwright_dtensor.mesh.error_report import LEFT_ALONE, WAITED


class Store:
    """Of a job in which no other rank makes a call."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def check(self, keys: list[str]) -> bool:
        return self.ended and keys[0].endswith("ended")


@pytest.mark.parametrize(
    ("ended", "timeout", "words"),
    [
        (False, 0.0, WAITED),
        # the time limit of a run, not that of the store, which has none
        (True, 1000.0, LEFT_ALONE),
    ],
)
def test_a_call_is_waited_for_as_long_as_a_collective(
    monkeypatch: pytest.MonkeyPatch, ended: bool, timeout: float, words: Any
) -> None:
    monkeypatch.setattr(call_order, "timeout_of_world", lambda: timeout)
    monkeypatch.setattr(call_order, "_POLLS", (1e-4, 1e-4))
    order = call_order.CallOrder()
    order._store = Store(ended)
    with pytest.raises(UsageError, match="needs every rank") as error:
        order._wait("end", "rank 0 train.py:1: model(x) (a call)")
    assert any(text in str(error.value) for text in words)
