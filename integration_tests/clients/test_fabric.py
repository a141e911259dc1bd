"""A script of Lightning Fabric trains to the numbers of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool

from .plans import LIMITS, PLANS, check

pytest.importorskip("lightning")

from .accelerate_script import model, samples
from .fabric_script import Fabric, on_rank, one_device

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("precision", "plan"), [("no", "pp2"), ("bf16", "zero3")])
def test_fabric_has_the_numbers_of_one_device(
    rank_pool: RankPool, tmp_path: Path, precision: str, plan: str
) -> None:
    exact = one_device(precision, tmp_path)
    check(rank_pool.run(2, on_rank, plan, precision, tmp_path), exact, LIMITS[precision])


def wrapped(rank: int, size: int) -> None:
    batch = {name: value[None].repeat(4, 1) for name, value in samples(1, seed=2)[0].items()}
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.strategy.setup_module(mw.auto_parallelize(model(), batch, **PLANS["dp2"]))


def test_plain_strategies_are_refused(rank_pool: RankPool) -> None:
    with pytest.raises(UnsupportedError, match="leave that call out"):
        rank_pool.run(2, wrapped)
