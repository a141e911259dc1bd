"""Checkpoints of parallel models: any plan reads any plan, training goes on as if nothing had been, and transformers reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from zoo import CASES

import meshwright as mw
from meshwright_checkpoint.commands import command
from meshwright_dtensor.testing.rank_pool import RankPool, fake_group

STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero3": (2, {"zero": 3, "dp": 2, "tp": 1}),
    "dp2-tp2": (4, {"dp": 2, "tp": 2}),
    "sp4": (4, {"tp": 4, "sequence_parallel": True}),
    "zero1-tp2": (4, {"zero": 1, "dp": 2, "tp": 2}),
}
MIXTURE: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2-tp2": (4, {"dp": 1, "ep": 2, "tp": 2}),
}


def made(name: str, size: int, pins: dict[str, Any], seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = CASES[name].model()
    mw.auto_parallelize(model, CASES[name].batch(), cluster="laptop-cpu", **pins)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(model: Any, optimizer: Any, name: str, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(50 + step)
        loss = model(**CASES[name].batch()).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(model: Any, optimizer: Any) -> dict[str, Any]:
    """Every global value, by name."""

    def whole(x: Any) -> Any:
        x = x.full_tensor() if isinstance(x, DTensor) else x
        return x.detach().clone() if isinstance(x, torch.Tensor) else x

    values_by_name = {name: whole(p) for name, p in model.state_dict(keep_vars=True).items()}
    for name, p in model.named_parameters():
        values_by_name.update({f"{name}/{key}": whole(x) for key, x in optimizer.state.get(p, {}).items()})
    return values_by_name


def saves(
    rank: int, size: int, name: str, pins: dict[str, Any], path: str
) -> tuple[dict[str, Any], list[float]]:
    model, optimizer = made(name, size, pins, 0)
    trained(model, optimizer, name, 1)
    handle = mw.save(path, model=model, optimizer=optimizer)
    values_by_name = values(model, optimizer)
    handle.wait()
    return values_by_name, trained(model, optimizer, name, STEPS)


def loads(
    rank: int, size: int, name: str, pins: dict[str, Any], paths: list[str]
) -> list[tuple[dict[str, Any], list[float]]]:
    result = []
    model, optimizer = made(name, size, pins, 1)
    for path in paths:
        assert mw.load(path, model=model, optimizer=optimizer) is None
        result.append((values(model, optimizer), trained(model, optimizer, name, STEPS)))
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layouts"), [("llama", LAYOUTS), ("gpt2", LAYOUTS), ("mixtral", MIXTURE)])
def test_any_to_any(name: str, layouts: dict[str, Any], rank_pool: RankPool, tmp_path: Path) -> None:
    chosen = {k: v for k, v in layouts.items() if name != "gpt2" or k in ("one", "dp2-tp2")}
    paths = {key: str(tmp_path / key) for key in chosen}
    saved = {
        key: rank_pool.run(size, saves, name, pins, paths[key])[0] for key, (size, pins) in chosen.items()
    }
    for number, (key, (size, pins)) in enumerate(chosen.items()):
        # every other pair, so that each layout is loaded and loaded into: `any_to_any.py` has them all
        sources = list(chosen)[1 - number % 2 :: 2]
        for values_by_name in rank_pool.run(size, loads, name, pins, [paths[source] for source in sources]):
            for source, (value, losses) in zip(sources, values_by_name, strict=True):
                expected, went_on = saved[source]
                different = [n for n in expected if not _equal(expected[n], value.get(n))]
                assert not different and expected.keys() == value.keys(), f"{source} -> {key}: {different}"
                assert losses == pytest.approx(went_on, rel=1e-5), f"{source} -> {key}"


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"zero": 3, "dp": 2, "tp": 1}, {"zero": 1, "dp": 2, "tp": 2}])
def test_written_for_a_plan_each_rank_has_its_part_in_one_file(pins: dict[str, Any], tmp_path: Path) -> None:
    """Also of what ZeRO shares, which no rule of the plan names."""
    torch.manual_seed(0)
    model: Any = CASES["llama"].model()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, "llama", 1)
    mw.save(tmp_path / "one", model=model, optimizer=optimizer, asynchronous=False)
    size = pins["dp"] * pins["tp"]
    plan = mw.plan(model, CASES["llama"].batch(), world_size=size, cluster="laptop-cpu", **pins)
    plan.save(tmp_path / "plan.json")
    run("reshard", tmp_path / "one", tmp_path / "more", "--plan", tmp_path / "plan.json")
    assert run("diff", tmp_path / "one", tmp_path / "more") == (0, "the checkpoints hold the same\n")
    stored = json.loads((tmp_path / "more" / "manifest.json").read_text())["tensors"]
    for rank in range(size):
        with fake_group(size, rank):
            here: Any = CASES["llama"].model()
            mw.parallelize(here, plan)
            alone = 0
            for name, parameter in here.named_parameters():
                shape, start = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                if math.prod(shape) * size != parameter.numel():
                    continue  # others have it too, and write a part of it
                alone += 1
                box = [list(pair) for pair in zip(start, shape, strict=True)]
                for key in (f"model/{name}", f"optimizer/{name}/exp_avg"):
                    assert [p["box"] for p in stored[key]["parts"] if p["file"] == rank] == [box], key
            assert alone > 5


def run(*arguments: object) -> tuple[Any, str]:
    result = CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def to_and_fro(rank: int, size: int, name: str, plan: Any, folder: str) -> Any:
    torch.manual_seed(1)
    model: Any = CASES[name].model()
    mw.parallelize(model, plan)
    mw.load(f"{folder}/hub", model=model)
    mw.export(f"{folder}/exported", model=model)
    return {n: p.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_from_pretrained_and_back(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = CASES[name].model().eval()
    model.save_pretrained(tmp_path / "hub", max_shard_size="60KB")
    pins: dict[str, Any] = {"dp": 1, "tp": 2, "pp": 2}
    plan = mw.plan(CASES[name].model(), CASES[name].batch(), world_size=4, cluster="laptop-cpu", **pins)
    expected = dict(model.named_parameters(remove_duplicate=False))
    names = set()
    for values_by_name in rank_pool.run(4, to_and_fro, name, plan, str(tmp_path)):
        assert all(torch.equal(expected[n], value) for n, value in values_by_name.items())
        names |= values_by_name.keys()
    assert names >= dict(model.named_parameters()).keys()
    again = type(model).from_pretrained(tmp_path / "exported").eval()
    batch = CASES[name].batch()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)
