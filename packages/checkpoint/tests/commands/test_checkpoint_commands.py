"""The command line on real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from models import adam, build, differences, everything, train

from meshwright_checkpoint import load, save
from meshwright_checkpoint.commands import command
from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.storage.backend import storage_of_path
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands") / "step-4"
    model = build("plain")
    optimizer = adam(model)
    train(model, optimizer)
    save(path, model=model, optimizer=optimizer, asynchronous=False)
    return path


def run(*arguments: object) -> tuple[Any, str]:
    """Return value and output, as `meshwright` runs it."""
    result = CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def test_inspect_shows_tensors_and_parts(saved: Path) -> None:
    _, text = run("inspect", saved)
    assert (
        "Block: step 4" in text
        and "model/first.weight" in text
        and "model/again.weight is model/head.weight" in text
    )
    data = json.loads(run("inspect", saved, "--json")[1])
    assert data["step"] == 4 and data["tensors"]["model/first.weight"]["shape"] == [36, 16]
    assert run("inspect", saved, "--tensor", "first.weight")[1].splitlines() == [
        "model/first.weight: F32 [36, 16], 1 part",
        "      from | 0 |",
        "         0 | 0 |",
    ]
    assert "extra:" not in text and "optimizer: AdamW, 1 parameter group\n" in text
    with pytest.raises(UsageError, match="--tensor nothing"):
        run("inspect", saved, "--tensor", "nothing")
    with pytest.raises(UsageError, match=r"did you mean 'first.weight'"):
        run("inspect", saved, "--tensor", "first.wieght")
    # a tied weight by any of its names
    drawn = [
        run("inspect", saved, "--tensor", name)[1]
        for name in ("head.weight", "again.weight", "model/again.weight")
    ]
    assert drawn[0] == drawn[1] == drawn[2] and drawn[0].startswith("model/head.weight")
    with pytest.raises(CheckpointError, match="does not exist; did you mean 'step-4'"):
        run("inspect", saved.parent / "step-44")


def test_inspect_names_foreign_content(saved: Path, tmp_path: Path) -> None:
    def error_text(path: Path) -> str:
        with pytest.raises(CheckpointError) as error:
            run("inspect", path)
        return str(error.value)

    assert f"is a file, and a checkpoint is a directory; give {saved}" in error_text(saved / "manifest.json")
    torch.save({}, tmp_path / "model.pt")
    assert "pickles, as torch.save writes them, are never read" in error_text(tmp_path / "model.pt")
    for name, hint in {
        ".metadata": 'backend="dcp"',
        "model.safetensors.index.json": "mw.load reads it for a model, without an optimizer",
        "data-00000.safetensors": "without their manifest",
        "pytorch_model.bin": "write them again with save_pretrained",
        "notes.txt": "has no manifest.json",
    }.items():
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / name).write_bytes(b"")
        assert hint in error_text(folder) and "not a checkpoint" in error_text(folder)
    assert error_text(tmp_path / "of notes.txt").endswith("it has no manifest.json")


def test_inspect_names_extra(tmp_path: Path) -> None:
    for number, (extra, shown) in enumerate([({"lr": 1.0, "seen": 3}, "lr, seen"), (7, "one value")]):
        path = tmp_path / str(number)
        save(path, model=build("plain"), extra=extra, asynchronous=False)
        assert f"\nextra: {shown}\n" in run("inspect", path)[1]


def test_reshard_accepts_tied_names_and_rejects_other_plan(saved: Path, tmp_path: Path) -> None:
    def plan(pattern: str) -> Path:
        rules = (ParameterRule(pattern=pattern, placement={"tp": "S(0)"}),)
        ParallelPlan(world_size=2, degrees={"tp": 2}, parameters=rules).save(tmp_path / "plan.json")
        return tmp_path / "plan.json"

    for name in ("head.weight", "again.weight"):
        run("reshard", saved, tmp_path / name, "--plan", plan(name))
        manifest = storage_of_path(tmp_path / name).manifest()
        assert len(manifest.tensors["model/head.weight"].parts) == 2
        assert {part.file for part in manifest.tensors["model/head.weight"].parts} == {0, 1}
    with pytest.raises(
        PlanError, match=r"parameters\[0\].pattern is 'first.wieght'.*nearest legal: first.weight"
    ):
        run("reshard", saved, tmp_path / "none", "--plan", plan("first.wieght"))
    assert not (tmp_path / "none").exists()


def test_verify_diff_and_reshard(saved: Path, tmp_path: Path) -> None:
    assert run("verify", saved)[0] == 0
    rules = (ParameterRule(pattern="first.*", placement={"tp": "S(0; 24+12)"}),)
    plan = ParallelPlan(world_size=4, degrees={"dp": 2, "tp": 2}, parameters=rules)
    plan.save(tmp_path / "plan.json")
    run("reshard", saved, tmp_path / "four", "--plan", tmp_path / "plan.json")
    run("reshard", tmp_path / "four", tmp_path / "three", "--ranks", 3)
    with pytest.raises(UsageError, match="either --ranks or --plan"):
        run("reshard", saved, tmp_path / "none")
    drawn = run("inspect", tmp_path / "four", "--tensor", "first.bias")[1]
    assert "4 parts" in drawn
    for path, files in ((tmp_path / "four", 4), (tmp_path / "three", 3)):
        assert len(list(path.glob("*.safetensors"))) == files and run("verify", path)[0] == 0
        assert run("diff", saved, path) == (
            0,
            "the checkpoints hold the same\n",
        )  # another layout, another plan
        models = [build("plain", seed) for seed in (1, 2)]
        optimizers = [adam(model) for model in models]
        for source, model, optimizer in zip((saved, path), models, optimizers, strict=True):
            load(source, model=model, optimizer=optimizer)
        assert not differences(*(everything(m, o) for m, o in zip(models, optimizers, strict=True)))


def test_verify_finds_damage_and_diff_differences(saved: Path, tmp_path: Path) -> None:
    run("reshard", saved, tmp_path / "x", "--ranks", 2)
    file = tmp_path / "x" / "data-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    code, text = run("verify", tmp_path / "x", "--json")
    assert code == 4 and "damaged" in json.loads(text)["problems"][0]
    model = build("plain")
    train(model, adam(model), 2)
    save(tmp_path / "other", model=model, asynchronous=False)
    code, text = run("diff", saved, tmp_path / "other")
    assert code == 1 == run("diff", saved, tmp_path / "other", "--json")[0]
    assert (
        "values    model/first.weight: 576 of 576" in text
        and "only in A optimizer/first.weight/exp_avg" in text
    )


def test_diff_exit_codes(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("diff", saved, saved) == (0, "the checkpoints hold the same\n")
    assert run("diff", saved, saved, "--json") == (0, "[]\n")
    run("reshard", saved, tmp_path / "torn", "--ranks", 2)
    file = tmp_path / "torn" / "data-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    for path in (tmp_path / "torn", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError) as trouble:
            run("diff", saved, path)
        assert trouble.value.exit_code == 2

    problems = {"not yours": PermissionError("not yours"), "ValueError: odd": ValueError("odd")}
    for error_text, problem in problems.items():
        for stopped in ("meshwright_checkpoint.convert.verify.compare", "click.echo"):
            with monkeypatch.context() as patch, pytest.raises(CheckpointError) as refused:
                patch.setattr(stopped, Mock(side_effect=problem, return_value=[]))
                run("diff", saved, saved)
            assert (
                f"could not be compared: {error_text}" in str(refused.value) and refused.value.exit_code == 2
            )


def test_export(saved: Path, tmp_path: Path) -> None:
    run("export", saved, tmp_path / "weights")
    model = build("plain", 3)
    load(tmp_path / "weights", model=model)
    other = build("plain", 4)
    load(saved, model=other)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    with pytest.raises(UsageError, match=f"file://{tmp_path}/elsewhere is a URL"):
        run("export", saved, f"file://{tmp_path}/elsewhere")
