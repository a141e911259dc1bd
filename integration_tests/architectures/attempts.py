"""Run subjects in every layout on ranks, of which the first one plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from meshwright_dtensor.testing.rank_pool import RankError, RankPool

from .judge import Verdict, decided
from .layouts import Layout
from .run_one import Failed, message, own_rounding, plan_and_run, plan_one, run_one
from .subject import Subject

TIMEOUT = 200.0
Plans = dict[str, str | Verdict] | str
"""What `plan_one` returns."""


def attempts(
    subjects: Sequence[Subject], layouts: Mapping[str, Layout]
) -> Iterator[str | dict[str, Verdict]]:
    """Name of a layout -> verdict, for one subject after the other; a text instead, where no model could be built."""
    with RankPool(max(layout.ranks for layout in layouts.values()), preload=[__name__]) as ranks:
        for subject in subjects:
            plans = _plan(ranks, subject, layouts)
            if isinstance(plans, str):
                yield plans
                continue
            yield {
                name: plan if isinstance(plan, Verdict) else _verdict(ranks, subject, layouts[name], plan)
                for name, plan in plans.items()
            }


def _plan(ranks: RankPool, subject: Subject, layouts: Mapping[str, Layout]) -> Plans:
    try:
        return ranks.run(2, plan_one, subject, dict(layouts), timeout=TIMEOUT)[0]
    except RankError as error:
        return dict.fromkeys(layouts, _lost("planning", error))


def _verdict(ranks: RankPool, subject: Subject, layout: Layout, plan: str) -> Verdict:
    return _decided(ranks, subject, layout, _attempt(ranks, subject, layout, plan, torch.float32))


def attempt(ranks: RankPool, subject: Subject, layout: Layout) -> Verdict:
    """The verdict of one subject in one layout. Raises what a rank does."""
    verdicts = ranks.run(layout.ranks, plan_and_run, subject, layout, timeout=TIMEOUT)
    return _decided(ranks, subject, layout, _of_all(verdicts))


def _decided(ranks: RankPool, subject: Subject, layout: Layout, verdict: Verdict) -> Verdict:
    """The verdict in float32, or that in float64 where it is wrong: rounding is another one on another processor."""
    if verdict.kind != "wrong" or any(math.isinf(relative) for _, relative in verdict.wrong):
        return verdict
    try:
        plans = ranks.run(1, plan_one, subject, {"": layout}, torch.float64, timeout=TIMEOUT)[0]
        rounding = ranks.run(1, own_rounding, subject, timeout=TIMEOUT)[0]
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
    ranks: RankPool,
    subject: Subject,
    layout: Layout,
    plan: str,
    dtype: torch.dtype,
    disputed: frozenset[str] = frozenset(),
) -> Verdict:
    try:
        verdicts = ranks.run(layout.ranks, run_one, subject, plan, dtype, disputed, timeout=TIMEOUT)
    except Failed as failed:
        return failed.verdict
    except RankError as error:
        return _lost("running", error)
    except Exception as error:  # of a rank: whatever it is, it is the verdict
        return Verdict("error", message(error))
    return _of_all(verdicts)


def _of_all(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of the ranks together."""
    worst = max(verdicts, key=lambda verdict: not verdict.passed)
    return replace(
        worst,
        sharded=min(verdict.sharded for verdict in verdicts),
        microbatches=min(verdict.microbatches for verdict in verdicts),
        seconds=max(verdict.seconds for verdict in verdicts),
    )


def _lost(where: str, error: RankError) -> Verdict:
    kind = "hang" if "did not finish" in str(error) else "error"
    return Verdict(kind, f"{where}: {' '.join(str(error).split())[:600]}")
