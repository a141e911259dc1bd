"""Vectorised activation memory against a loop over actions."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright_dtensor.strategy import ModuleWork
from meshwright_pipeline.planning.activation_memory import (
    FIRST,
    FORWARD,
    LATE,
    WHOLE,
    MemoryPeak,
    RankActions,
)
from meshwright_pipeline.planning.unit_costs import sum_work


class StageBytes(NamedTuple):
    """The arguments of RankActions.held."""

    saved: tuple[float, ...]
    over: tuple[float, ...]
    deferred_bytes: tuple[float, ...]
    gradients: tuple[float, ...]
    split: bool
    first: tuple[float, ...]


def one_by_one(actions: list[int], stages: int, sizes: StageBytes) -> tuple[float, MemoryPeak]:
    """The same for one rank, in a loop."""
    left = list(sizes.gradients)
    now = most = made = 0.0
    moments: list[MemoryPeak] = [MemoryPeak()]
    for kind, stage in (divmod(number, stages) for number in actions):
        if kind == FORWARD:
            now += sizes.saved[stage]
            most = max(most, now)
            moments.append(MemoryPeak(now, 0.0, made))
            continue
        if kind != LATE:
            over = sizes.first if kind == FIRST and sizes.split else sizes.over
            moments.append(MemoryPeak(now, over[stage], made))
        if kind == WHOLE or (kind == FIRST and not sizes.split):
            now -= sizes.saved[stage]
        elif kind == FIRST:
            now += sizes.deferred_bytes[stage]
            moments.append(MemoryPeak(now, 0.0, made))
        elif sizes.split:
            now -= sizes.saved[stage] + sizes.deferred_bytes[stage]
        if kind == WHOLE or (kind == (LATE if sizes.split else FIRST)):
            made, left[stage] = made + left[stage], 0.0
    return most, max(moments, key=lambda peak: peak.total)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int, StageBytes]:
    """Ranks with different stages and numbers of actions; whole and split backwards; sizes exact in floats."""
    ranks, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    stages = ranks * each
    all_ranks = []
    for rank in range(ranks):
        stages_of_rank = [rank + ranks * number for number in range(each)]
        done: list[int] = []
        open_: list[tuple[int, int]] = []
        for stage in draw(st.lists(st.sampled_from(stages_of_rank), max_size=8)):
            open_.append((FORWARD, stage))
        for _, stage in draw(st.permutations(open_)):
            halves = draw(st.booleans())
            done += [FIRST * stages + stage, LATE * stages + stage] if halves else [WHOLE * stages + stage]
        all_ranks.append([FORWARD * stages + stage for _, stage in open_] + done)
    size = st.integers(0, 1000).map(float)
    saved, over, waiting, gradients, first = (draw(st.tuples(*[size] * stages)) for _ in range(5))
    return all_ranks, stages, StageBytes(saved, over, waiting, gradients, draw(st.booleans()), first)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases())
def test_vectorised_memory_matches_a_loop(case: tuple[list[list[int]], int, StageBytes]) -> None:
    ranks, stages, sizes = case
    held, fullest = RankActions(ranks, stages).held(*sizes)
    for stages_of_rank, most, full in zip(ranks, held, fullest, strict=True):
        expected, moment = one_by_one(stages_of_rank, stages, sizes)
        assert most == expected
        assert full == moment


def test_gradients_stay_after_their_first_backward() -> None:
    sizes = StageBytes((4.0,), (1.0,), (0.0,), (10.0,), False, (1.0,))
    numbers = [FORWARD, WHOLE, FORWARD, WHOLE]
    ((most,), (full,)) = RankActions([numbers], 1).held(*sizes)
    assert most == 4.0
    assert full == MemoryPeak(4.0, 1.0, 10.0)  # during the second backward the gradients of the first exist


@pytest.mark.parametrize("split", [False, True])
def test_a_rank_without_actions_holds_nothing(split: bool) -> None:
    sizes = StageBytes(*([(1.0, 1.0)] * 4), split, (1.0, 1.0))
    held, fullest = RankActions([[FORWARD * 2, WHOLE * 2], []], 2).held(*sizes)
    assert list(itertools.chain(held[1:], fullest[1:])) == [0.0, MemoryPeak()]


def test_first_half_holds_deferred_bytes() -> None:
    """Three modules run backward from the last: deferred bytes of later modules exist, and no kept bytes are freed."""
    parts = [
        ModuleWork("m", 1.0, 100.0, transient_bytes=transient, deferred_bytes=waiting)
        for transient, waiting in ((5, 1), (9, 7), (2, 4))
    ]
    run = sum_work("m", parts)
    assert run.first == max(5 + 7 + 4, 9 + 4, 2)
    assert run.over == 2  # whole backwards free 100 bytes with each module
    assert sum_work("m", parts[:1]).then(sum_work("m", parts[1:])).first == run.first
    sizes = StageBytes((300.0,), (run.over,), (run.deferred_bytes,), (0.0,), True, (run.first,))
    (_,), (full,) = RankActions([[FORWARD, FIRST, LATE]], 1).held(*sizes)
    assert full == MemoryPeak(300.0, run.first, 0.0)
