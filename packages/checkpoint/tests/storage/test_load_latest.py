"""`load_latest` and `latest` where checkpoints are damaged: only damage leads to an older one, and it is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_checkpoint import (
    CheckpointError,
    CorruptError,
    LoadedCheckpoint,
    MismatchError,
    latest,
    load_latest,
    save,
)
from meshwright_checkpoint.folder_checkpoints import FolderCheckpoints
from meshwright_checkpoint.format.manifest import NAME, Manifest
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.saving import background
from meshwright_checkpoint.storage import retention
from meshwright_dtensor.testing.rank_pool import RankPool

DATA = "data-00000.safetensors"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


KINDS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "flipped value": (flip, DATA, "the stored values of"),
    "truncated file": (cut, DATA, "bytes, and"),
    "missing file": (Path.unlink, DATA, "is missing"),
    "flipped manifest": (flip, NAME, "its checksum does not match"),
    "truncated manifest": (cut, NAME, "its checksum does not match"),
    "empty manifest": (lambda path: path.write_bytes(b""), NAME, "its first line is not a checksum"),
    "missing manifest": (Path.unlink, NAME, "is missing"),
}


def linear(value: float, size: int = 3) -> nn.Linear:
    model = nn.Linear(size, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 1, 2 and 3, whose values are their steps."""
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", model=linear(step), extra=step).wait()
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_one_is_loaded_and_the_damage_is_told(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, file, text = KINDS[kind]
    damage(folder / "step-3" / file)
    before = files(folder)
    model = linear(0)
    loaded = load_latest(folder, model=model)
    assert loaded is not None and Path(loaded.path).name == "step-2" and loaded.extra == 2
    assert all(torch.equal(value, torch.full_like(value, 2)) for value in model.state_dict().values())
    ((path, what),) = loaded.damaged.items()
    assert path == str(folder / "step-3") and text in what and file in what
    assert f"checkpoint {path} is left out, for it is damaged: {what}" in caplog.text
    assert files(folder) == before
    caplog.clear()
    if kind == "flipped value":
        # which nobody sees without reading it
        assert latest(folder) == path and not caplog.messages
    else:
        assert latest(folder) == str(folder / "step-2") and what in caplog.text


def test_a_whole_one_is_loaded_without_a_word(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(folder / "step-2" / DATA)
    loaded = load_latest(folder, model=linear(0))
    assert loaded is not None and loaded.extra == 3 and not loaded.damaged and not caplog.messages
    assert load_latest(folder / "nowhere", model=linear(0)) is None


def test_where_none_is_whole_it_raises(folder: Path) -> None:
    for step, kind in ((1, "flipped value"), (2, "missing file"), (3, "truncated manifest")):
        damage, file, _ = KINDS[kind]
        damage(folder / f"step-{step}" / file)
    with pytest.raises(CorruptError, match="is whole, so there is none to go on from") as error:
        load_latest(folder, model=linear(0))
    assert all(f"step-{step}" in str(error.value) for step in (1, 2, 3))
    shutil.rmtree(folder / "step-1")
    # None would begin anew without notice
    with pytest.raises(CorruptError, match="Restore one of them, or begin anew in another folder"):
        latest(folder)


def test_what_is_not_damage_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder / "step-4", model=linear(4, size=5)).wait()
    with pytest.raises(MismatchError, match="step-4 does not fit"):
        load_latest(folder, model=linear(0))
    flip(folder / "step-4" / DATA)
    with pytest.raises(MismatchError, match="step-4 does not fit"):
        load_latest(folder, model=linear(0))
    shutil.rmtree(folder / "step-4")

    def newer(data: bytes, where: str) -> Manifest:
        return whole({**json.loads(data), "version": 3} if "step-3" in where else json.loads(data), where)

    whole = Manifest.checked
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "from_bytes", newer)
        for call in (latest, lambda folder: load_latest(folder, model=linear(0))):
            with pytest.raises(CheckpointError, match="has version 3"):
                call(folder)

    def no_list(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", no_list)
    with pytest.raises(CheckpointError, match="cannot be listed: Permission denied"):
        latest(folder)


def agreed(rank: int, size: int, other: str) -> tuple[str, str]:
    """What ranks make of an error of rank 1, which is damage or another one."""
    there = FolderCheckpoints("unused", Ranks())

    def work() -> int:
        if rank == 1:
            raise CorruptError("file 7 is damaged") if other == "damage" else CheckpointError("no route")
        if other == "both":
            raise CorruptError("file 6 is damaged")
        return 5

    try:
        return str(there.unless_damaged(work)), ""
    except CheckpointError as error:
        return "raised" if type(error) is CheckpointError else "damage", str(error)


def test_ranks_agree_on_damage(rank_pool: RankPool) -> None:
    told = rank_pool.run(3, agreed, "damage")
    assert told == [(str((None, "file 7 is damaged (seen by rank 1)")), "")] * 3
    assert [what for what, _ in rank_pool.run(3, agreed, "network")] == ["raised"] * 3
    assert set(rank_pool.run(3, agreed, "both")) == {
        ("raised", "rank 1 failed: no route"),
        ("raised", "no route"),
    }


def fail(patch: pytest.MonkeyPatch, owner: Any, call: str, file: str, number: int) -> None:
    """Let a call of the system fail for a file of a checkpoint. `os.preadv` fails for every file."""
    right = getattr(owner, call)

    def wrong(path: Any, *arguments: Any, **options: Any) -> Any:
        if file == "" or str(path).endswith(f"step-3/{file}"):
            raise OSError(number, os.strerror(number))
        return right(path, *arguments, **options)

    patch.setattr(owner, call, wrong)


@pytest.mark.parametrize(
    ("owner", "call", "file", "numbers"),
    [
        (os, "open", NAME, (errno.EACCES, errno.EMFILE)),
        (os, "open", DATA, (errno.EMFILE, errno.ESTALE)),
        (Path, "stat", DATA, (errno.EACCES, errno.ETIMEDOUT)),
        (os, "preadv", "", (errno.EIO, errno.ESTALE)),
    ],
)
def test_what_cannot_be_read_is_no_damage(
    folder: Path,
    owner: Any,
    call: str,
    file: str,
    numbers: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = linear(0)
    for number in numbers:
        with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error:
            fail(patch, owner, call, file, number)
            load_latest(folder, model=model)
        assert type(error.value) is CheckpointError
        assert "step-3" in str(error.value) and os.strerror(number) in str(error.value)
        assert not any(value.any() for value in model.state_dict().values())
    # the same calls tell of damage too
    if file:
        with monkeypatch.context() as patch:
            fail(patch, owner, call, file, errno.ENOENT)
            loaded = load_latest(folder, model=model)
        assert loaded is not None and list(loaded.damaged) == [str(folder / "step-3")]


def test_a_link_and_a_directory_are_no_files_of_a_checkpoint(folder: Path) -> None:
    data = folder / "step-3" / DATA
    data.rename(folder / "elsewhere")
    data.symlink_to(folder / "elsewhere")
    (folder / "step-2" / DATA).unlink()
    (folder / "step-2" / DATA).mkdir()
    loaded = load_latest(folder, model=linear(0))
    assert loaded is not None and loaded.extra == 1 and len(loaded.damaged) == 2


def failed_alone(rank: int, size: int, folder: str, file: str, on: int) -> tuple[str, str]:
    """What a rank gets where a rank alone cannot open one more file."""
    model = linear(0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == on:
            fail(patch, os, "open", file, errno.EMFILE)
        try:
            loaded = load_latest(folder, model=model)
        except CheckpointError as error:
            return type(error).__name__, str(error)
    assert loaded is not None
    return "loaded", loaded.path


def test_ranks_agree_where_one_cannot_read(rank_pool: RankPool, folder: Path) -> None:
    where = str(folder)
    for on in (0, 1):
        for kind, text in rank_pool.run(2, failed_alone, where, NAME, on):
            assert kind == "CheckpointError" and "Too many open files" in text
    # one of the ranks reads the values for both
    of_data = [rank_pool.run(2, failed_alone, where, DATA, on) for on in (0, 1)]
    told = [[kind for kind, _ in ranks] for ranks in of_data]
    assert ["CheckpointError"] * 2 in told
    assert all(kinds in (["CheckpointError"] * 2, ["loaded"] * 2) for kinds in told)


def test_a_damaged_step_is_saved_again_under_a_new_path(folder: Path) -> None:
    flip(folder / "step-3" / DATA)
    loaded = load_latest(folder, model=linear(0))
    assert loaded is not None and loaded.new_path("step-4") == str(folder / "step-4")
    with pytest.raises(CheckpointError, match="exists already"):
        save(folder / "step-3", model=linear(4))
    save(loaded.new_path("step-3"), model=linear(4), extra=4).wait()
    again = load_latest(folder, model=linear(0))
    assert again is not None and again.extra == 4 and not again.damaged
    assert again.path == str(folder / "step-3-again-3")
    flip(folder / "step-3-again-3" / DATA)
    again = load_latest(folder, model=linear(0))
    assert again is not None and again.new_path("step-3") == str(folder / "step-3-again-3-again-3")
    assert LoadedCheckpoint(again.path, None, {str(folder / "best"): "?"}).new_path("best") == str(
        folder / "best-again"
    )


def test_manifests_of_other_kinds_are_no_checkpoints(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    others = folder / "others"
    for text in ("{}", "", json.dumps({"sha256": "0" * 64, "shards": ["shard-0.bin"]})):
        (others / f"tokens-{len(text)}").mkdir(parents=True)
        (others / f"tokens-{len(text)}" / NAME).write_text(text)
        (folder / f"tokens-{len(text)}").mkdir()
        (folder / f"tokens-{len(text)}" / NAME).write_text(text)
    (folder / NAME).write_text("{}")
    assert latest(others) is None and load_latest(others, model=linear(0)) is None
    assert latest(folder) == str(folder / "step-3") and not caplog.messages
    # ours, whatever its manifest says
    (folder / "step-3" / NAME).write_text("{}")
    assert latest(folder) == str(folder / "step-2") and "step-3" in caplog.text


def saved_unlisted(rank: int, size: int, folder: str) -> tuple[bool, str]:
    """A save after which rank 0 cannot list the older checkpoints: whether it is committed, and what the log says."""

    def unlisted(parent: object) -> None:
        raise CheckpointError(f"{folder} cannot be listed")

    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "found_in", unlisted)
        patch.setattr(background._log, "warning", lambda text, *values: lines.append(text % values))
        handle = save(f"{folder}/step-4", model=linear(4), keep_last=1)
        handle.wait()
    return handle.committed, " ".join(lines)


def test_a_save_is_committed_where_older_ones_cannot_be_removed(rank_pool: RankPool, folder: Path) -> None:
    (first, text), (second, _) = rank_pool.run(2, saved_unlisted, str(folder))
    assert first and second and latest(folder) == str(folder / "step-4")
    assert "older checkpoints were not removed: " in text and "cannot be listed" in text
