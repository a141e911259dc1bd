"""Loaders of torchdata, datasets and webdataset feed parallel models, and go on where they stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .accelerate_script import ROWS, model
from .data_script import numbers, on_rank, one_device, rows, write_shards
from .plans import LIMITS, PLANS, gap

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [("torchdata", "zero3", "tp2"), ("datasets", "dp2", "pp2"), ("webdataset", "pp2", "zero3")]


@pytest.mark.parametrize(("name", "plan", "later"), CASES)
def test_loaders_go_on_where_they_stopped(
    rank_pool: RankPool, tmp_path: Path, name: str, plan: str, later: str
) -> None:
    pytest.importorskip(name)
    exact = one_device(name, tmp_path)["losses"]
    runs = rank_pool.run(2, on_rank, plan, name, tmp_path / plan)
    resumed = rank_pool.run(2, on_rank, later, name, tmp_path / later, tmp_path / plan)
    assert len(resumed[0]["losses"]) == 3
    for result in (*runs, *resumed):
        assert gap(result["losses"], exact[-len(result["losses"]) :]) < LIMITS["no"]


def split(rank: int, size: int, folder: Path, plan: str) -> list[float | str]:
    """The loss of a batch to which each rank gives its own rows: plainly, and said to be so."""
    import webdataset

    example = {"input_ids": rows()[:ROWS], "labels": rows()[:ROWS]}
    net = mw.auto_parallelize(model().eval(), example, **PLANS[plan])
    paths = write_shards(folder / str(rank))
    results: list[float | str] = []
    for local in (False, True):
        data = webdataset.WebDataset(paths, shardshuffle=False, nodesplitter=webdataset.split_by_node)
        loader = webdataset.WebLoader(data.map(numbers), batch_size=ROWS // 2)
        try:
            ids = next(iter(mw.shard_loader(loader, rows="local", model=net) if local else loader))
            results.append(net(input_ids=ids, labels=ids).loss.item())
        except mw.errors.MeshwrightError as error:
            results.append(str(error))
    return results


def test_rows_of_each_rank_are_said_to_be_so(rank_pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    first, second = rows().chunk(2)
    ids = torch.cat([first[: ROWS // 2], second[: ROWS // 2]])
    with torch.no_grad():
        exact = model().eval()(input_ids=ids, labels=ids).loss.item()
    for plain, local in rank_pool.run(2, split, tmp_path, "dp2"):
        assert "rank" in str(plain)
        assert gap([local], [exact]) < LIMITS["no"]
    for results in rank_pool.run(2, split, tmp_path, "tp2"):
        assert all(isinstance(result, str) and "rank" in result for result in results)
