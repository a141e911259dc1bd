"""What a rank waits for others is told apart from the rest of its time, while somebody measures."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from meshwright_dtensor.devices import HOST, Device, waits
from meshwright_dtensor.devices.waits import Waits, wait_for, waiting


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Work:
    """An operation that takes three seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self) -> None:
        self.clock.now += 3


def test_time_is_divided() -> None:
    clock = Clock()
    measured, all_along = Waits(clock), Waits(clock)
    all_along.begin()
    wait_for(Work(clock))  # type: ignore[arg-type]
    measured.begin()
    clock.now += 2
    with waiting():
        clock.now += 5
        # a wait inside of another one counts once
        wait_for(Work(clock))  # type: ignore[arg-type]
    wait_for(None)
    clock.now += 1
    assert measured.end() == (11, 8)
    wait_for(Work(clock))  # type: ignore[arg-type]
    assert all_along.end() == (17, 14)
    # of its own step only
    measured.begin()
    assert measured.end() == (0, 0)


def test_a_wait_that_fails_is_one() -> None:
    clock = Clock()
    measured = Waits(clock)
    measured.begin()
    with pytest.raises(RuntimeError), waiting():
        clock.now += 4
        raise RuntimeError("timed out")
    clock.now += 1
    assert measured.end() == (5, 4)


def test_nothing_is_measured_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Accelerator(Device):
        def __init__(self) -> None:
            self.name = HOST.type

        def wait_for_stream(self) -> None:
            calls.append("wait")

    monkeypatch.setattr(waits, "default_device", Accelerator)
    with waiting():
        pass
    assert not calls and isinstance(waiting(), nullcontext)
    measured = Waits()
    measured.begin()
    with waiting():
        pass
    measured.end()
    # at the beginning, around the wait, and at the end
    assert calls == ["wait"] * 4
    measured.begin()
    measured.stop()
    assert isinstance(waiting(), nullcontext)
