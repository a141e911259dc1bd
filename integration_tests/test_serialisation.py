"""torch.save, pickle, copy and safetensors of parallel values: the whole value, or an error with the way. Loading back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_once import plan_once
from safetensors.torch import load_file, save_file
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool

ONE = {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "zero": 0}
# every rank has the whole of every value
WHOLE = {"dp": {"dp": 2}}
PARTS = {
    "tp": {"tp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2},
    "pp-tp": {"pp": 2, "tp": 2},
    "pp-zero2": {"pp": 2, "dp": 2, "zero": 2},
}


def trained(pins: dict[str, Any] | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after two steps, on one device where there are no pins."""
    torch.manual_seed(0)
    model, batch = CASES["gpt2"].model(), CASES["gpt2"].batch()
    if pins is not None:
        model = mw.parallelize(model, plan_once(model, batch, cluster="laptop-cpu", **{**ONE, **pins}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        torch.manual_seed(step)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def full_states(rank: int, size: int, pins: dict[str, Any], folder: str) -> None:
    model, _ = trained(pins)
    single, _ = trained(None)
    expected = single.state_dict()
    first, everywhere = mw.full_state_dict(model), mw.full_state_dict(model, everywhere=True)
    assert first.keys() == (expected.keys() if rank == 0 else set())
    assert everywhere.keys() == expected.keys()
    for name, value in everywhere.items():
        assert type(value) is torch.Tensor and value.device.type == "cpu"
        torch.testing.assert_close(value, expected[name])
    # a tied weight is one tensor
    assert everywhere["lm_head.weight"] is everywhere["transformer.wte.weight"]
    path = Path(folder, "model.pt")
    if rank == 0:
        torch.save(first, path)
    torch.distributed.barrier()
    # into another model in the same layout
    torch.manual_seed(5)
    again, batch = CASES["gpt2"].model(), CASES["gpt2"].batch()
    again = mw.parallelize(again, plan_once(again, batch, cluster="laptop-cpu", **{**ONE, **pins}))
    again.load_state_dict(torch.load(path))
    loaded = mw.full_state_dict(again, everywhere=True)
    assert all(torch.equal(loaded[name], value) for name, value in everywhere.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WHOLE, *PARTS])
def test_full_state_dict_is_that_of_one_device(rank_pool: RankPool, name: str, tmp_path: Path) -> None:
    rank_pool.run(4 if "-" in name else 2, full_states, {**WHOLE, **PARTS}[name], str(tmp_path), timeout=100)
    torch.manual_seed(6)
    model = CASES["gpt2"].model()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))


def whole_values(rank: int, size: int, folder: str) -> None:
    model, optimizer = trained(WHOLE["dp"])
    single, _ = trained(None)
    loss = model.eval()(**CASES["gpt2"].batch()).loss
    state = saved(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "cpu": {name: value.cpu() for name, value in model.state_dict().items()},
            "parameters": list(model.parameters()),
            "loss": loss.detach(),
        }
    )
    for values in (state["model"], state["cpu"]):
        for name, value in single.state_dict().items():
            assert type(values[name]) is torch.Tensor
            torch.testing.assert_close(values[name], value)
    assert all(type(parameter) is torch.nn.Parameter for parameter in state["parameters"])
    assert state["loss"].item() == loss.item()
    assert torch.equal(pickle.loads(pickle.dumps(loss.detach())), loss.full_tensor())
    torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9).load_state_dict(state["optimizer"])
    save_file({name: value.clone() for name, value in model.state_dict().items()}, Path(folder, f"{rank}.st"))
    assert load_file(Path(folder, f"{rank}.st")).keys() == single.state_dict().keys()
    # transformers writes on rank 0 alone
    model.save_pretrained(Path(folder, str(rank)))
    if rank == 0:
        type(single).from_pretrained(Path(folder, str(rank)))
    assert isinstance(copy.deepcopy(model), type(single))
    with pytest.raises(UnsupportedError, match=r"mw\.full_state_dict\(model\)"):
        saved(model)


@pytest.mark.slow
def test_values_that_every_rank_has_are_saved_as_plain_tensors(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, whole_values, str(tmp_path), timeout=100)


def parts(rank: int, size: int, pins: dict[str, Any], folder: str) -> None:
    model, optimizer = trained(pins)
    state = model.state_dict()
    part = next(p for p in model.parameters() if p.dim() == 2)
    attempts: list[Callable[[], Any]] = [
        lambda: saved(state),
        lambda: saved(optimizer.state_dict()),
        lambda: saved({name: value.clone() for name, value in state.items()}),
        lambda: saved(model),
        lambda: saved(list(model.parameters())),
        lambda: pickle.dumps(optimizer.state_dict()),
        lambda: save_file({name: value.clone() for name, value in state.items()}, Path(folder, "part.st")),
    ]
    # of pipeline stages, a copy on the CPU is the whole value on every rank
    if "pp" not in pins:
        attempts.append(lambda: saved({name: value.cpu() for name, value in state.items()}))
    # zero 1 and 2 shard optimizer states and gradients, and the stored parameters with them
    if "zero" in pins or "tp" in pins:
        attempts += [lambda: copy.copy(part), lambda: pickle.dumps(part.detach())]
    for number, attempt in enumerate(attempts):
        with pytest.raises(UnsupportedError, match=r"mw\.full_state_dict\(model\)"):
            attempt()
            pytest.fail(f"attempt {number} has written a part")
    # transformers takes the state dict on all ranks, and writes on rank 0
    try:
        model.save_pretrained(Path(folder, "pretrained"))
        assert rank, "rank 0 has written a part"
    except UnsupportedError as error:
        assert "mw.full_state_dict(model)" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PARTS))
def test_parts_of_values_are_not_saved(rank_pool: RankPool, name: str, tmp_path: Path) -> None:
    rank_pool.run(4 if "-" in name else 2, parts, PARTS[name], str(tmp_path), timeout=100)
