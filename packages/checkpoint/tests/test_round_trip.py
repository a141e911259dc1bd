"""Save and load in one process; a checkpoint that does not fit raises with all names and changes nothing."""

from __future__ import annotations

import json
import os
import random
import runpy
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, adam, build, differences, everything, train
from torch import nn

from meshwright_checkpoint import (
    CheckpointError,
    MismatchError,
    checkpoints,
    export,
    latest,
    load,
    save,
)
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.format.safetensors_file import header_length, read_header
from meshwright_checkpoint.read import shared_read
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.testing.rank_pool import RankPool


def trained(seed: int = 0, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build("plain", seed)
    optimizer = adam(model)
    train(model, optimizer, steps)
    return model, optimizer


def put(path: Path, steps: int = 1, **options: Any) -> dict[str, Any]:
    model, optimizer = trained(steps=steps)
    save(path, model=model, optimizer=optimizer, asynchronous=False, **options)
    return everything(model, optimizer)


def test_load_restores_everything(tmp_path: Path) -> None:
    extra = {
        "epoch": 3,
        "floats": (0.1, float("inf")),
        7: [None, True],
        "mask": torch.tensor([True, False]),
        "$x": "y",
    }
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    before = everything(model, optimizer)
    handle = save(
        tmp_path / "run" / "step-12",
        model=model,
        optimizer=optimizer,
        extra={**extra, "s": scheduler.state_dict()},
    )
    drawn = torch.rand(3), random.random()
    with torch.no_grad():  # the save must have the values at the time of the call
        for parameter in model.parameters():
            parameter.zero_()
    handle.wait()
    assert handle.done
    other, its = trained(seed=5, steps=2)
    back = load(latest(tmp_path / "run") or "", model=other, optimizer=its)
    assert not differences(before, everything(other, its))
    assert torch.equal(back.pop("mask"), extra.pop("mask")) and back.pop("s") == scheduler.state_dict()  # type: ignore[arg-type]
    assert back == extra
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    put(tmp_path / "x")
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["data-00000.safetensors", "manifest.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]
    manifest = Manifest.from_bytes((tmp_path / "x" / "manifest.json").read_bytes(), "x")
    assert manifest.model.aliases == {"again.weight": "head.weight"}
    assert "model/again.weight" not in manifest.tensors
    data = (tmp_path / "x" / "data-00000.safetensors").read_bytes()
    length = header_length(data[:8], len(data), "x")
    entries, metadata = read_header(data[: 8 + length], len(data), "x")
    assert entries.keys() == manifest.tensors.keys() and metadata["checkpoint"] == manifest.id
    assert all(entries[key].offset == stored.parts[0].offset for key, stored in manifest.tensors.items())


def test_mismatch_lists_all_names_and_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path / "x")
    model: Any = Block()
    model.first = nn.Linear(16, 35)
    model.second.double()
    del model.norm
    model.added = nn.Linear(2, 2, bias=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        load(tmp_path / "x", model=model)
    error = caught.value
    assert error.missing == ("added.weight",)
    assert set(error.unexpected) == {
        f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert (
        len(error.mismatched) == 4
        and "second.weight: float32 is stored, the model has float64" in error.mismatched
    )
    assert all(name in str(error) for name in (*error.missing, *error.unexpected, *error.mismatched))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_load_with_only_cast_and_strict(tmp_path: Path) -> None:
    value = put(tmp_path / "x")
    model: Any = Block().double()
    first = model.first.weight.clone()
    load(tmp_path / "x", model=model, only="head.*", cast=True)
    assert torch.equal(model.head.weight, value["head.weight"].double()) and torch.equal(
        model.first.weight, first
    )
    with pytest.raises(MismatchError, match=r"nothing\.\*"):
        load(tmp_path / "x", model=model, only=["nothing.*"], cast=True)
    with pytest.raises(MismatchError, match=r"nothing\.\*"):
        load(tmp_path / "x", model=model, only="nothing.*", cast=True, strict=False)
    model = Block()
    model.added = nn.Linear(2, 2)
    del model.head
    with pytest.warns(
        UserWarning,
        match=r"in part. not in the checkpoint \(2\): added.weight.*not in the model \(\d\): head",
    ) as warned:
        load(tmp_path / "x", model=model, strict=False)
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings(action="error"), pytest.raises(CheckpointError, match="loaded in part"):
        load(tmp_path / "x", model=model, strict=False)
    assert torch.equal(model.first.weight, value["first.weight"])


def test_load_rejects_model_without_common_names(tmp_path: Path) -> None:
    save(tmp_path / "x", model=build("plain"), asynchronous=False)
    other = torch.nn.Linear(3, 3)
    before = other.weight.clone()
    with pytest.raises(MismatchError, match="all names of the model"):
        load(tmp_path / "x", model=other, strict=False)
    assert torch.equal(other.weight, before)
    with pytest.raises(UsageError, match=r"latest\(\) returns None"):
        load(latest(tmp_path / "none"), model=other)
    for path, what in ((tmp_path / "x", "a checkpoint itself"), (tmp_path / "x" / "manifest.json", "a file")):
        with pytest.raises(UsageError, match=f"{path} is {what}; pass its parent directory"):
            latest(path)
    for call in (load, save):
        with pytest.raises(
            UsageError,
            match=r"must be an nn.Module, and is of type OrderedDict; pass the model itself",
        ):
            call(tmp_path / "y", model=other.state_dict())
    for step in ("5", -1, 1.5):
        with pytest.raises(UsageError, match=f"step={step!r} is not a training step"):
            save(tmp_path / "y", model=other, step=step)  # type: ignore[arg-type]


def test_invalid_path_is_named_in_error(tmp_path: Path) -> None:
    model = build("plain")
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointError,
        match=f"{tmp_path / 'file'} is a file; save to a path where a directory can be created",
    ):
        save(tmp_path / "file" / "step-1", model=model)
    for call in (save, load):
        with pytest.raises(UsageError, match=r"foo://bucket/x cannot be opened: .*foo"):
            call("foo://bucket/x", model=model)
    url = f"file://{tmp_path}/weights"
    with pytest.raises(UsageError, match=f"{url} is a URL, and from_pretrained reads directories"):
        export(url, model=model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ("class", "leave out optimizer, or pass one of the saved class"),
        ("shape", "shapes must equal the saved ones"),
        ("dtype", "cast=True changes dtypes"),
        ("name", "strict=False ignores missing"),
    ],
)
def test_mismatch_names_only_the_fix_that_applies(change: str, advice: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    save(tmp_path / "x", model=model, optimizer=torch.optim.AdamW(model.parameters()), asynchronous=False)
    other: nn.Module = nn.Linear(5 if change == "shape" else 4, 3)
    other = nn.Sequential(other) if change == "name" else other.double() if change == "dtype" else other
    optimizer = torch.optim.SGD(other.parameters()) if change == "class" else None
    with pytest.raises(MismatchError) as refused:
        load(tmp_path / "x", model=other, optimizer=optimizer)
    fix = str(refused.value).rpartition(". ")[2]
    assert advice in fix and fix.count(";") == 0


def test_load_not_strict_keeps_optimizer_that_was_not_saved(tmp_path: Path) -> None:
    model, saved = build("plain"), build("plain", 1)
    save(tmp_path / "x", model=saved, asynchronous=False)
    optimizer = adam(model)
    train(model, optimizer)
    state = optimizer.state_dict()["state"]
    with pytest.warns(UserWarning, match="not in the checkpoint.*the optimizer"):
        load(tmp_path / "x", model=model, optimizer=optimizer, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    assert optimizer.state_dict()["state"].keys() == state.keys()


def test_optimizer_groups_match_by_parameter_name(tmp_path: Path) -> None:
    def grouped(turn: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = Block()
        groups = [
            {"params": list(model.first.parameters()), "lr": 0.1 + turn},
            {
                "params": [p for n, p in model.named_parameters() if not n.startswith("first")],
                "lr": torch.tensor(0.2 + turn),
            },
        ]
        return model, torch.optim.AdamW(groups[:: -1 if turn else 1])

    model, optimizer = grouped(0)
    train(model, optimizer)
    save(tmp_path / "x", model=model, optimizer=optimizer, asynchronous=False)
    other, its = grouped(1)
    load(tmp_path / "x", model=other, optimizer=its)
    assert [float(group["lr"]) for group in its.param_groups] == [pytest.approx(0.2), 0.1]
    assert isinstance(its.param_groups[0]["lr"], torch.Tensor)
    assert not differences(everything(model, optimizer), everything(other, its))
    with pytest.raises(MismatchError, match="group 0 was saved as 2 groups, whose options differ"):
        load(tmp_path / "x", model=other, optimizer=adam(other))
    with pytest.raises(MismatchError, match="AdamW was saved, this is SGD"):
        load(tmp_path / "x", model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))


def in_two_groups(model: nn.Module, *decays: float) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW(
        [{"params": some, "weight_decay": x} for some, x in zip(([first], others), decays, strict=True)]
    )


@pytest.mark.parametrize("saved_in_two", [False, True])
@pytest.mark.parametrize("loaded_in_two", [False, True])
def test_groups_take_options_saved_with_their_parameters(
    saved_in_two: bool, loaded_in_two: bool, tmp_path: Path
) -> None:
    """For any grouping at save and load, and any present options."""
    model: Any = Block()
    saved = (
        in_two_groups(model, 0.2, 0.2)
        if saved_in_two
        else torch.optim.AdamW(model.parameters(), weight_decay=0.2)
    )
    train(model, saved)
    save(tmp_path / "x", model=model, optimizer=saved, asynchronous=False)
    its = in_two_groups(model, 0.3, 0.4) if loaded_in_two else torch.optim.AdamW(model.parameters(), lr=7.0)
    load(tmp_path / "x", model=model, optimizer=its)
    assert {(group["lr"], group["weight_decay"]) for group in its.param_groups} == {(1e-3, 0.2)}
    assert its.state.keys() == saved.state.keys()


def test_a_group_without_parameters_takes_its_options_back(tmp_path: Path) -> None:
    model = build("plain", 0)
    groups = [{"params": [], "lr": 0.5, "betas": (0.8, 0.9)}, {"params": list(model.parameters()), "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups, 0.01)
    save(tmp_path / "step-1", model=model, optimizer=optimizer, asynchronous=False)
    new = torch.optim.AdamW([{"params": []}, {"params": list(model.parameters())}], 0.01)
    load(tmp_path / "step-1", model=model, optimizer=new)
    assert [group["lr"] for group in new.param_groups] == [0.5, 0.2]
    assert new.param_groups[0]["betas"] == (0.8, 0.9)


def test_load_rejects_joined_groups_with_different_options(tmp_path: Path) -> None:
    model: Any = Block()
    saved = in_two_groups(model, 0.1, 0.2)
    train(model, saved)
    save(tmp_path / "x", model=model, optimizer=saved, asynchronous=False)
    its = in_two_groups(model, 0.3, 0.3)
    load(tmp_path / "x", model=model, optimizer=its)
    assert [group["weight_decay"] for group in its.param_groups] == [0.1, 0.2]
    with pytest.raises(MismatchError, match="group 0 was saved as 2 groups, whose options differ"):
        load(tmp_path / "x", model=model, optimizer=adam(model))


def parts_of_groups(rank: int, world_size: int, directory: str) -> list[list[float]]:
    """Each rank has a part of the parameters, as a pipeline stage; rank 0 has none of the second group."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def of_stage(stage: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        part = nn.ModuleDict({str(stage): model[stage]})
        groups = [
            {
                "params": [p for n, p in part.named_parameters() if ("1.weight" in n) == second],
                "lr": lr * (1 + second),
            }
            for second in (False, True)
        ]
        return part, torch.optim.AdamW(groups)

    part, optimizer = of_stage(rank, 0.1)
    train_on = sum(p.sum() for p in part.parameters())
    train_on.backward()  # type: ignore[union-attr]
    optimizer.step()
    save(directory, model=part, optimizer=optimizer, asynchronous=False)
    rates = []
    for only in (None, "0.*", "1.weight"):
        part, optimizer = of_stage(rank, 7.0)
        load(directory, model=part, optimizer=optimizer, only=only)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def test_ranks_with_parts_of_a_group_agree_on_its_options(rank_pool: RankPool, tmp_path: Path) -> None:
    rates, others = rank_pool.run(2, parts_of_groups, str(tmp_path / "x"))
    assert rates == others
    whole, none, second = rates
    assert whole == [0.1, 0.2], "rank 0 has no parameter of the second group"
    assert none == [7.0, 14.0], "the first group is loaded whole on rank 0 only"
    assert second == [7.0, 0.2]


def test_load_only_restores_optimizer_states_of_the_part(tmp_path: Path) -> None:
    model: Any = Block()
    optimizer = adam(model)
    train(model, optimizer)
    save(tmp_path / "x", model=model, optimizer=optimizer, asynchronous=False)
    other: Any = Block()
    groups = [{"params": list(other.head.parameters())}, {"params": list(other.first.parameters())}]
    its = torch.optim.AdamW(groups, lr=7.0)
    load(tmp_path / "x", model=other, optimizer=its, only="head.*")
    state = optimizer.state[model.head.weight]
    assert torch.equal(its.state[other.head.weight]["exp_avg"], state["exp_avg"])
    assert other.first.weight not in its.state, "other parameters are unchanged"
    assert [group["lr"] for group in its.param_groups] == [optimizer.param_groups[0]["lr"], 7.0]


class Counting(nn.Linear):
    """A module with extra state that is not a tensor."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "last": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] + int(state["last"].sum())


def test_extra_states_of_modules_are_restored(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(2, 2))
    model[0].calls = 5  # type: ignore[assignment]
    save(tmp_path / "x", model=model, asynchronous=False)
    other = nn.Sequential(Counting(2, 2))
    load(tmp_path / "x", model=other)
    assert other[0].calls == 7


def test_save_rejects_unsupported_values(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(UnsupportedError, match=r"extra\.a\.1 is of type object"):
        save(tmp_path / "x", model=model, extra={"a": [1, object()]})
    with pytest.raises(UsageError, match="is not a parameter of the model"):
        save(tmp_path / "x", model=Block(), optimizer=optimizer)
    with pytest.raises(UsageError, match="meta device"):
        save(tmp_path / "x", model=nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match="keep_last=0"):
        save(tmp_path / "x", model=model, keep_last=0)
    assert not list(tmp_path.iterdir())
    put(tmp_path / "x")
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "x", model=model)
    with pytest.raises(CheckpointError, match=r"not a checkpoint.*it holds x: give one of them"):
        load(tmp_path, model=model)


def test_latest_is_found_and_old_checkpoints_are_removed(tmp_path: Path) -> None:
    for step in range(1, 8):
        put(tmp_path / f"step-{step}", keep_last=2, keep_every=3)
    assert [Path(p).name for p in checkpoints(tmp_path)] == ["step-3", "step-6", "step-7"]
    (tmp_path / "step-9").mkdir()  # incomplete: no manifest
    data = tmp_path / "step-7" / "data-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    assert latest(tmp_path) == str(tmp_path / "step-6")
    assert latest(tmp_path / "nowhere") is None


def test_failed_save_raises_at_next_save_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright_checkpoint.io import direct_write

    def full(self: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    put(tmp_path / "step-1")
    model, _ = trained()
    with monkeypatch.context() as patch:
        patch.setattr(direct_write.Writer, "write", full)
        handle = save(tmp_path / "step-2", model=model)
        with pytest.raises(CheckpointError, match="No space left"):
            handle.wait()
        assert repr(handle) == f"SaveHandle('{tmp_path}/step-2', failed)"
        handle = save(
            tmp_path / "step-2", model=model
        )  # wait() has raised the error, so it is not raised again
        while not handle.done:
            time.sleep(0.01)
    with pytest.raises(
        CheckpointError, match=r"the save before this one failed, and this.*call it again.*No space left"
    ):
        save(tmp_path / "step-3", model=model)
    save(tmp_path / "step-3", model=model, asynchronous=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_save_removes_leftovers_of_killed_saves(tmp_path: Path) -> None:
    for name in (".step-1.partial-0a", ".step-0.partial-0b", ".step-0.deleted-0c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data-00000.safetensors").write_bytes(b"half")
    put(tmp_path / "step-1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1"]


def test_import_without_sched_getaffinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS and Windows have none
    assert 2 <= runpy.run_path(shared_read.__file__)["reader_threads"](1) <= 4


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    put(tmp_path / "x", extra={"nan": float("nan")})
    text = (tmp_path / "x" / "manifest.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
