"""Save in any layout and load in any layout: plain, FSDP2, tensor parallel, both, and permuted."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import adam, build, differences, everything, train

from meshwright_checkpoint import load, save
from meshwright_dtensor.testing.rank_pool import RankPool

LAYOUTS = (("plain", 1), ("plain", 2), ("fsdp", 2), ("tp", 2), ("runs", 2), ("fsdp+tp", 4), ("fsdp", 4))


def saved(rank: int, size: int, path: str, layout: str) -> dict[str, Any]:
    model = build(layout)
    optimizer = adam(model)
    train(model, optimizer)
    save(path, model=model, optimizer=optimizer, extra={"layout": layout}, asynchronous=False)
    return everything(model, optimizer)


def loaded(rank: int, size: int, paths: list[str], layout: str) -> list[dict[str, Any]]:
    result = []
    model = build(layout, seed=1)
    optimizer = adam(model)
    optimizer.param_groups[0]["lr"] = 0.5
    for path in paths:
        assert load(path, model=model, optimizer=optimizer)["layout"]
        result.append(everything(model, optimizer))
    train(model, optimizer)  # the optimizer can go on with the states
    assert optimizer.param_groups[0]["lr"] == 0.01
    return [*result, everything(model, optimizer)]


@pytest.mark.slow
def test_every_layout_loads_every_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    paths, values = [], []
    for layout, size in LAYOUTS:
        paths.append(str(tmp_path / f"{layout}-{size}"))
        values.append(rank_pool.run(size, saved, paths[-1], layout)[0])
    for value in values[1:]:
        assert value.keys() == values[0].keys()
    model = build("plain")
    optimizer = adam(model)
    train(model, optimizer, 1)
    assert not differences(everything(model, optimizer), values[0])
    for layout, size in LAYOUTS:
        for results in rank_pool.run(size, loaded, paths, layout):
            for path, value, there in zip(paths, values, results, strict=False):
                assert not differences(value, there), f"{path} into {layout} on {size} ranks"


def refuses_overlap(rank: int, size: int, path: str) -> str:
    model: Any = torch.nn.Linear(4, 4) if rank else torch.nn.Linear(4, 5)
    try:
        save(path, model=model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_save_rejects_different_shapes_on_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    for text in rank_pool.run(2, refuses_overlap, str(tmp_path / "x")):
        assert text.startswith("UsageError: model/weight has shape [4, 4]") or "rank" in text, text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1, 4])
def test_ranks_share_the_writing(size: int, rank_pool: RankPool, tmp_path: Path) -> None:
    sizes = rank_pool.run(size, written, str(tmp_path / "x"))[0]
    assert len(sizes) == size
    assert max(sizes) <= 1.05 * sum(sizes) / size


def written(rank: int, size: int, path: str) -> list[int]:
    model = torch.nn.ParameterDict(
        {"large": torch.zeros(3, 700_001), "small": torch.zeros(130_000), "one": torch.zeros(())}
    )
    save(path, model=model, asynchronous=False)
    return sorted(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def streams(rank: int, size: int, path: str, private: bool, loads: bool) -> list[float]:
    """Save, or load, and draw from torch and from Python."""
    model = torch.nn.Linear(2, 2)
    torch.manual_seed(99 if loads else rank if private else 5)
    random.seed(rank)
    if loads:
        with warnings.catch_warnings(record=True) as caught:
            load(path, model=model)
        assert len(caught) == (private and size == 1)
    else:
        save(path, model=model, asynchronous=False)
    return [float(torch.rand(())), random.random()]


@pytest.mark.slow
@pytest.mark.parametrize("private", [False, True])
def test_random_streams_are_restored(private: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    drawn = rank_pool.run(2, streams, path, private, False)
    assert rank_pool.run(2, streams, path, private, True) == drawn
    alone = rank_pool.run(1, streams, path, private, True)[0]
    assert (alone[0] == drawn[0][0]) == (not private)
