"""Run architectures, in every layout, on reused ranks: planning on one rank while the others run what is planned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from meshwright_dtensor.testing.rank_pool import RankError, RankPool

from .catalogue import Architecture
from .judge import Verdict, decided
from .layouts import world_size
from .run_one import own_rounding, plan_one, run_one

TIMEOUT = 300.0
RENEWED = 40
"""After so many architectures ranks start afresh, so that what they remember of models does not pile up."""


@dataclass
class Row:
    """One line of the table: verdicts by layout, or why there are none."""

    architecture: Architecture
    unbuildable: str = ""
    verdicts: dict[str, Verdict] = field(default_factory=dict)


class Ranks:
    """A pool that is renewed now and then. One thread at a time."""

    def __init__(self, size: int) -> None:
        self.size, self.pool, self.calls = size, RankPool(size), 0

    def renew(self) -> None:
        """Called once per architecture."""
        self.calls += 1
        if self.calls % RENEWED == 0:
            self.pool.close()
            self.pool = RankPool(self.size)


def sweep(architectures: Sequence[Architecture], layouts: Sequence[str]) -> Iterator[Row]:
    """Rows in the order of `architectures`; whatever goes wrong is in the row."""
    planning, running = Ranks(1), Ranks(max(map(world_size, layouts)))
    with ThreadPoolExecutor(1) as planner, ThreadPoolExecutor(1) as runner:
        try:
            planned = [planner.submit(_plan, planning, each, list(layouts)) for each in architectures]
            done = [runner.submit(_run, running, *pair) for pair in zip(architectures, planned, strict=True)]
            for future in done:
                yield future.result()
        finally:
            planner.shutdown(cancel_futures=True)
            runner.shutdown(cancel_futures=True)
            planning.pool.close()
            running.pool.close()


def _plan(ranks: Ranks, architecture: Architecture, layouts: list[str]) -> dict[str, str] | str:
    ranks.renew()
    try:
        return ranks.pool.run(1, plan_one, architecture, layouts, timeout=TIMEOUT)[0]
    except RankError as error:
        return dict.fromkeys(layouts, f"!planning: {_short(error)}")


def _run(ranks: Ranks, architecture: Architecture, planned: Future[dict[str, str] | str]) -> Row:
    ranks.renew()
    plans = planned.result()
    if isinstance(plans, str):
        return Row(architecture, unbuildable=plans)
    row = Row(architecture)
    for layout, plan in plans.items():
        row.verdicts[layout] = (
            Verdict("error", plan[1:])
            if plan.startswith("!")
            else _verdict(ranks, architecture, layout, plan)
        )
    return row


def _verdict(ranks: Ranks, architecture: Architecture, layout: str, plan: str) -> Verdict:
    verdict = _attempt(ranks, architecture, layout, plan, torch.float32)
    if verdict.kind != "wrong" or any(math.isinf(relative) for _, relative in verdict.wrong):
        return verdict
    try:
        plans = ranks.pool.run(1, plan_one, architecture, [layout], torch.float64, timeout=TIMEOUT)[0]
        rounding = ranks.pool.run(1, own_rounding, architecture, timeout=TIMEOUT)[0]
    except Exception as error:  # it does not run in float64: the verdict stands
        return replace(verdict, reason=f"{verdict.reason}; in float64: {_short(error)}")
    plan = plans if isinstance(plans, str) else plans[layout]
    if isinstance(plans, str) or plan.startswith("!"):
        return replace(verdict, reason=f"{verdict.reason}; in float64: {plan}")
    disputed = frozenset(name for name, _ in verdict.wrong)
    exact = _attempt(ranks, architecture, layout, plan, torch.float64, disputed)
    return decided(verdict, exact, rounding)


def _attempt(
    ranks: Ranks,
    architecture: Architecture,
    layout: str,
    plan: str,
    dtype: torch.dtype,
    disputed: frozenset[str] = frozenset(),
) -> Verdict:
    try:
        verdicts = ranks.pool.run(
            world_size(layout), run_one, architecture, plan, dtype, disputed, timeout=TIMEOUT
        )
    except RankError as error:
        return Verdict("hang" if "did not finish" in str(error) else "error", _short(error))
    except Exception as error:  # of a rank: whatever it is, it is the verdict
        return Verdict("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    worst = max(verdicts, key=lambda verdict: not verdict.passed)
    return replace(worst, seconds=max(verdict.seconds for verdict in verdicts))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:600]
