"""A long run, shortened, and the measure of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright_dtensor.testing.rank_pool import RankPool

from .long_run import Held, growth, run_layout, table


@pytest.mark.slow
def test_open_files_and_threads_do_not_grow(rank_pool: RankPool, tmp_path: Path) -> None:
    for held in run_layout(rank_pool, "pp2", tmp_path, 40, 4):
        assert [each.step for each in held] == list(range(4, 44, 4))
        # a save may be under way in some; one that is left by each save would be five more
        assert min(each.handles for each in held[5:]) <= max(each.handles for each in held[:5])
        assert min(each.threads for each in held[5:]) <= max(each.threads for each in held[:5])


def test_growth_is_that_of_the_last_half() -> None:
    leak = [Held(step, 1_000_000 + 1_000 * step, 10 + (step > 30), 3, 5) for step in range(40)]
    assert growth(leak, "memory") == pytest.approx(1_037_000 / 1_022_000 - 1)
    assert growth(leak, "threads") == 0.0
    assert "handles 10 to 11" in next(table([leak]))
