"""Slow ranks are named, whatever the plan, and those that wait for them are not."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.runs import stragglers
from meshwright.runs.stragglers import StragglerWatch, medians_of_others
from meshwright_dtensor.devices import waits
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": {"dp": 4}},
    "tp": {
        "degrees": {"dp": 1, "tp": 4},
        "parameters": (
            ParameterRule(pattern="1.weight", placement={"tp": "S(0)"}),
            ParameterRule(pattern="3.weight", placement={"tp": "S(1)"}),
        ),
    },
    "zero3": {"degrees": {"zero": 4}, "zero": {"stage": 3}},
    "pp": {
        "degrees": {"pp": 2, "dp": 2},
        "pipeline": PipelineRule(stages=(("1",), ("3",)), microbatches=2),
    },
}
SLEEP = 0.3


class Work(nn.Module):
    """Takes time on some ranks, in the forward pass."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def named(rank: int, size: int, plan: str, slow: list[int], where: str) -> tuple[list[int], list[str]]:
    """The ranks that are named, and the lines of the log."""
    mw.init()
    torch.manual_seed(0)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    seconds = SLEEP * (rank in slow)
    model = nn.Sequential(Work(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = mw.parallelize(model, ParallelPlan(world_size=size, **PLANS[plan]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = mw.watch_stragglers(model, optimizer, 1, checks=2)
    try:
        for _ in range(3):
            model[0].seconds = seconds if where == "forward" else 0.0
            if where == "data":
                time.sleep(seconds)
            model(torch.ones(8, 8)).square().mean().backward()
            if where == "optimizer":
                time.sleep(seconds)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        watch.remove()
        logging.getLogger("meshwright").removeHandler(handler)
    return [each.rank for each in watch.slow], lines


@pytest.mark.parametrize(
    ("plan", "slow", "where"),
    [
        ("dp", [2], "forward"),
        ("tp", [1], "data"),
        ("zero3", [0, 3], "forward"),
        ("pp", [3], "data"),
        ("dp", [1], "optimizer"),
    ],
)
def test_a_rank_that_sleeps_is_named(rank_pool: RankPool, plan: str, slow: list[int], where: str) -> None:
    results = rank_pool.run(4, named, plan, slow, where)
    assert [ranks for ranks, _ in results] == [slow] * 4
    (_, lines), *others = results
    assert [
        f"rank {rank} on " in line and " is slow: a step takes it " in line
        for rank, line in zip(slow, lines, strict=True)
    ]
    assert not any(lines for _, lines in others)


def without_waits(rank: int, size: int) -> list[int]:
    """Who is named where the time of waiting counts as a rank's own."""
    with patch.object(waits.Waits, "_leave", lambda self: None):
        return named(rank, size, "dp", [2], "forward")[0]


def test_the_time_of_waiting_is_what_tells_them_apart(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, without_waits) == [[]] * 4


def told(
    rank: int, size: int, table: list[list[int]], options: dict[str, Any]
) -> tuple[list[list[int]], list[str]]:
    """Who is slow after each step, and the log. table: of each step the seconds of each rank, by a clock of its own."""
    mw.init()
    now, lines = [0.0], list[str]()
    watch = StragglerWatch(0, 1, clock=lambda: now[0], **options)
    slow = []
    with patch.object(stragglers._log, "warning", lambda text, *words: lines.append(text % words)):
        for step in table:
            now[0] += step[rank]
            watch.end_step()
            slow.append([each.rank for each in watch.slow])
    watch.remove()
    return slow[1:], lines


def test_a_change_is_told_once(rank_pool: RankPool) -> None:
    even, slow = [10, 10, 10, 10], [10, 10, 40, 10]
    # the first step is not measured; one slow step, and one that is not, change nothing
    table = [even, slow, even, slow, slow, slow, even, slow, even, even, even]
    (after, lines), *others = rank_pool.run(4, told, table, {"checks": 2})
    assert after == [[], [], [], [2], [2], [2], [2], [2], [], []]
    assert len(lines) == 2 and "rank 2 on" in lines[0] and "40 s and the others 10 s" in lines[0]
    assert "is not slow any more" in lines[1]
    assert all(result == (after, []) for result in others)


def test_ranks_that_are_not_much_slower_are_not_named(rank_pool: RankPool) -> None:
    for figures in ([10, 10, 14, 10], [10, 10, 10, 10]):
        assert rank_pool.run(4, told, [figures] * 5, {"checks": 1})[0] == ([[]] * 4, [])
    # the factor is the caller's
    assert rank_pool.run(4, told, [[10, 10, 14, 10]] * 3, {"checks": 1, "factor": 1.3})[0][0] == [[2]] * 2


def test_medians_of_others() -> None:
    assert medians_of_others([1.0, 9.0]) == [9.0, 1.0]
    assert medians_of_others([5.0, 1.0, 7.0]) == [1.0, 5.0, 1.0]
    assert medians_of_others([8.0, 1.0, 9.0, 2.0]) == [2.0, 8.0, 2.0, 8.0]


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"checks": 0}, {"factor": 1.0}])
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        mw.watch_stragglers(nn.Identity(), **wrong)


def in_a_loop(rank: int, size: int, folder: str) -> Any:
    """Of `mw.elastic`."""
    mw.init()
    model = nn.Linear(4, 4)
    mw.parallelize(model, ParallelPlan(world_size=size, degrees={"dp": size}))
    run = mw.elastic(Path(folder), model=model, stragglers=1)
    for _ in run.steps(4):
        time.sleep(SLEEP if rank == 1 else 0.0)
        model(torch.ones(4, 4)).sum().backward()
    assert run.watch is not None
    return [(each.rank, each.seconds > SLEEP > each.median) for each in run.watch.slow]


def test_the_loop_of_elastic_names_them(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(3, in_a_loop, str(tmp_path / "run")) == [[(1, True)]] * 3
    none = rank_pool.run(2, unwatched, str(tmp_path / "other"))
    assert none == [None, None]


def unwatched(rank: int, size: int, folder: str) -> Any:
    """The watch of a loop without one."""
    mw.init()
    return mw.elastic(folder, model=nn.Linear(2, 2), stragglers=None).watch


def test_a_watch_that_is_left_measures_no_more(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, left_measuring) == [(1, 0)] * 2


def left_measuring(rank: int, size: int) -> tuple[int, int]:
    """How many measure while there is a watch, and after it."""
    mw.init()
    watch = StragglerWatch(0, 1)
    watch.end_step()
    while_there = len(waits.Waits._measuring)
    del watch
    return while_there, len(waits.Waits._measuring)
