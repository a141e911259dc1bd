"""Run subjects in every layout on ranks: planning on one rank while the others run what is planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from meshwright_dtensor.testing.rank_pool import RankError, RankPool

from .judge import Verdict, decided
from .layouts import Layout
from .run_one import Failed, message, own_rounding, plan_one, run_one
from .subject import Subject

TIMEOUT = 200.0
Plans = dict[str, str | Verdict] | str
"""What `plan_one` returns."""


class Ranks:
    """A pool that starts afresh after every so many subjects. One thread at a time."""

    def __init__(self, size: int, renewed: int) -> None:
        self.size, self.renewed, self.calls = size, renewed, 0
        self.pool = self._new()

    def _new(self) -> RankPool:
        return RankPool(self.size, preload=[__name__])

    def renew(self) -> None:
        """Called once per subject."""
        if self.calls and self.calls % self.renewed == 0:
            self.pool.close()
            self.pool = self._new()
        self.calls += 1


def attempts(
    subjects: Sequence[Subject], layouts: Mapping[str, Layout], renewed: int = 0
) -> Iterator[str | dict[str, Verdict]]:
    """Name of a layout -> verdict, for one subject after the other; a text instead, where no model could be built.

    `renewed`: after so many subjects ranks start afresh, so that what they remember of models does not pile up. With 0, they
    do not, and the ranks that run a subject plan it first.
    """
    running = Ranks(max(layout.ranks for layout in layouts.values()), renewed)
    if not renewed:
        try:
            for subject in subjects:
                yield _run(running, subject, layouts, _plan(running, subject, layouts))
        finally:
            running.pool.close()
        return
    planning = Ranks(1, renewed)
    with ThreadPoolExecutor(1) as planner, ThreadPoolExecutor(1) as runner:
        try:
            planned = [planner.submit(_next, planning, _plan, each, layouts) for each in subjects]
            done = [
                runner.submit(_next, running, _run, subject, layouts, plans)
                for subject, plans in zip(subjects, planned, strict=True)
            ]
            for future in done:
                yield future.result()
        finally:
            planner.shutdown(cancel_futures=True)
            runner.shutdown(cancel_futures=True)
            planning.pool.close()
            running.pool.close()


def _next(ranks: Ranks, work: Callable[..., Any], *arguments: Any) -> Any:
    ranks.renew()
    return work(ranks, *(each.result() if isinstance(each, Future) else each for each in arguments))


def _plan(ranks: Ranks, subject: Subject, layouts: Mapping[str, Layout]) -> Plans:
    try:
        return ranks.pool.run(min(2, ranks.size), plan_one, subject, dict(layouts), timeout=TIMEOUT)[0]
    except RankError as error:
        return dict.fromkeys(layouts, _lost("planning", error))


def _run(
    ranks: Ranks, subject: Subject, layouts: Mapping[str, Layout], plans: Plans
) -> str | dict[str, Verdict]:
    if isinstance(plans, str):
        return plans
    return {
        name: plan if isinstance(plan, Verdict) else _verdict(ranks, subject, layouts[name], plan)
        for name, plan in plans.items()
    }


def _verdict(ranks: Ranks, subject: Subject, layout: Layout, plan: str) -> Verdict:
    verdict = _attempt(ranks, subject, layout, plan, torch.float32)
    if verdict.kind != "wrong" or any(math.isinf(relative) for _, relative in verdict.wrong):
        return verdict
    try:
        plans = ranks.pool.run(1, plan_one, subject, {"": layout}, torch.float64, timeout=TIMEOUT)[0]
        rounding = ranks.pool.run(1, own_rounding, subject, timeout=TIMEOUT)[0]
    except Exception as error:  # it does not run in float64: the verdict stands
        return replace(verdict, reason=f"{verdict.reason}; in float64: {message(error)}")
    again = plans if isinstance(plans, str) else plans[""]
    if isinstance(again, Verdict) or isinstance(plans, str):
        why = again if isinstance(again, str) else again.reason
        return replace(verdict, reason=f"{verdict.reason}; in float64: {why}")
    disputed = frozenset(name for name, _ in verdict.wrong)
    exact = _attempt(ranks, subject, layout, again, torch.float64, disputed)
    return decided(verdict, exact, rounding)


def _attempt(
    ranks: Ranks,
    subject: Subject,
    layout: Layout,
    plan: str,
    dtype: torch.dtype,
    disputed: frozenset[str] = frozenset(),
) -> Verdict:
    try:
        verdicts = ranks.pool.run(layout.ranks, run_one, subject, plan, dtype, disputed, timeout=TIMEOUT)
    except Failed as failed:
        return failed.verdict
    except RankError as error:
        return _lost("running", error)
    except Exception as error:  # of a rank: whatever it is, it is the verdict
        return Verdict("error", message(error))
    worst = max(verdicts, key=lambda verdict: not verdict.passed)
    return replace(worst, seconds=max(verdict.seconds for verdict in verdicts))


def _lost(where: str, error: RankError) -> Verdict:
    kind = "hang" if "did not finish" in str(error) else "error"
    return Verdict(kind, f"{where}: {' '.join(str(error).split())[:600]}")
