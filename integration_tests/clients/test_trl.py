"""Trainers of TRL train to the numbers of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.testing.rank_pool import RankPool

from .plans import LIMITS, check

pytest.importorskip("trl")
pytest.importorskip("datasets")

from .trl_script import on_rank, one_device

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("method", "plan"), [("SFT", "tp2"), ("DPO", "zero3")])
def test_trl_has_the_numbers_of_one_device(
    rank_pool: RankPool, tmp_path: Path, method: str, plan: str
) -> None:
    exact = one_device(method, tmp_path / "one")
    check(rank_pool.run(2, on_rank, plan, method, tmp_path / plan), exact, LIMITS["no"])


def test_pipelines_of_trl_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"degrees\.pp is 2"):
        rank_pool.run(2, on_rank, "pp2", "SFT", tmp_path)
