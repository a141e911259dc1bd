"""A save waits for a rank that does not answer only as long as a collective would, and not while nobody waits for it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from meshwright_checkpoint import CheckpointError
from meshwright_checkpoint.saving import background


class Others:
    """Ranks of which one does not answer; `waiter` waits for the save from the tenth look on.

    missed: the rank does not answer so many questions, then answers all; None answers none.
    """

    def __init__(self, waiter: str, missed: int | None = None) -> None:
        missing = cast(Any, None)
        self.job = background.Job(*[missing] * 10)
        self.waiter, self.looks, self.questions, self.missed = waiter, 0, 0, missed

    def look(self) -> str | None:
        self.looks += 1
        if self.looks == 10:
            assert self.questions == 0
            getattr(self.job, self.waiter).set()
        return "committed" if self.looks == 50 else None

    def silent(self) -> list[str]:
        self.questions += 1
        return [] if self.missed is not None and self.questions > self.missed else ["rank 1 does not answer"]


@pytest.mark.parametrize(
    ("waiter", "timeout", "questions"), [("leaves", 1000, 2), ("waits", 0, 1), ("waits", 1000, 0)]
)
def test_a_silent_rank_ends_a_save(
    monkeypatch: pytest.MonkeyPatch, waiter: str, timeout: float, questions: int
) -> None:
    monkeypatch.setattr(background, "GRACE_SECONDS", 1e-3)
    monkeypatch.setattr(background, "timeout_of_world", lambda: timeout)
    others = Others(waiter)
    if questions:
        with pytest.raises(CheckpointError, match="rank 1 does not answer"):
            background._awaited(others.look, others.job, cast(Any, others))
    else:
        # the save goes on, since a collective would
        assert background._awaited(others.look, others.job, cast(Any, others)) == "committed"
    assert others.questions == questions


def test_one_late_answer_ends_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "GRACE_SECONDS", 1e-3)
    others = Others("leaves", missed=1)
    assert background._awaited(others.look, others.job, cast(Any, others)) == "committed"
    assert others.questions > 1


def test_nobody_waits_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, job = background.SaveHandle("step-1", None), Others("waits").job

    def interrupted(timeout: float | None) -> bool:
        assert job.waits.is_set()
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "_job", job)
    monkeypatch.setattr(handle._done, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert not job.waits.is_set() and job.patience() is None
