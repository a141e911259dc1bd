"""Object stores through fsspec, in memory and with real ranks in a directory; backends of plugins."""

from __future__ import annotations

import json
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from click.testing import CliRunner
from models import adam, build, differences, everything, train

from meshwright_checkpoint import CheckpointError, CorruptError, checkpoints, latest, load, load_latest, save
from meshwright_checkpoint.commands import command
from meshwright_checkpoint.storage import object_store
from meshwright_dtensor import plugins
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.testing.rank_pool import RankPool


@pytest.fixture
def store() -> Any:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/run", recursive=True) if fs.exists("/run") else None


def test_save_and_load_in_memory_store(store: Any) -> None:
    model = build("plain")
    optimizer = adam(model)
    train(model, optimizer)
    for step in (1, 2, 3):
        save(f"memory://run/step-{step}", model=model, optimizer=optimizer, keep_last=2).wait()
    assert [Path(p).name for p in checkpoints("memory://run")] == ["step-2", "step-3"]
    path = latest("memory://run")
    assert path is not None and sorted(Path(p).name for p in store.ls("/run/step-3", detail=False)) == [
        "data-00000.safetensors",
        "manifest.json",
    ]
    other = build("plain", 1)
    its = adam(other)
    load(path, model=other, optimizer=its)
    assert not differences(everything(model, optimizer), everything(other, its))
    with pytest.raises(CheckpointError, match="exists already"):
        save(path, model=model)
    data = bytearray(store.cat_file("/run/step-3/data-00000.safetensors"))
    data[-9] ^= 1
    store.pipe_file("/run/step-3/data-00000.safetensors", bytes(data))
    with pytest.raises(CorruptError, match="damaged"):
        load(path, model=other, optimizer=its)
    store.pipe_file("/run/step-3/data-00000.safetensors", bytes(data[:-9]))
    assert latest("memory://run") == "memory:///run/step-2"


def test_save_rejects_live_lease_and_ignores_dead_one(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("plain")
    lease = {"time": time.time(), "by": "another"}
    store.pipe_file("/run/x/.saving-lock", json.dumps(lease).encode())
    store.pipe_file("/run/x/data-00000.safetensors", b"half")
    with pytest.raises(CheckpointError, match="another job is saving"):
        save("memory://run/x", model=model)
    assert latest("memory://run") is None
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 0.0)  # the holder has died
    assert object_store.lease_holder(store, "/run/x/.saving-lock") is None
    monkeypatch.setattr(object_store, "LEASE_SECONDS", 60.0)
    store.pipe_file("/run/x/.saving-lock", json.dumps({**lease, "time": time.time() - 61}).encode())
    save("memory://run/x", model=model, asynchronous=False)
    load("memory://run/x", model=model)


def test_lease_is_read_again_during_renewal(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lease = "/run/x/.saving-lock", json.dumps({"time": time.time(), "by": "another"}).encode()
    looks = iter((b"", lease[:9], lease))
    monkeypatch.setattr(object_store, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(type(store), "cat_file", lambda *_: next(looks))
    assert object_store.lease_holder(store, path) == "another"
    looks = iter((b"", b"", b"", lease))
    assert object_store.lease_holder(store, path) is None


class NoAnswerError(Exception):
    """As libraries of stores raise, which have errors of their own."""


@pytest.mark.parametrize(
    "wrong", [PermissionError(13, "Forbidden"), TimeoutError(), NoAnswerError("no answer")]
)
def test_a_store_that_fails_is_no_damage(
    store: Any, wrong: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        save(f"memory://run/step-{step}", model=model).wait()
    kind = type(store)

    def fail(patch: pytest.MonkeyPatch, call: str, file: str, error: Exception) -> None:
        right = getattr(kind, call)

        def failing(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
            if path.endswith(file):
                raise error
            return right(self, path, *arguments, **options)

        patch.setattr(kind, call, failing)

    data = "step-2/data-00000.safetensors"
    cases = [("cat_file", "step-2/manifest.json"), ("cat_file", data), ("info", data), ("ls", "/run")]
    for call, file in cases:
        with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error:
            fail(patch, call, file, wrong)
            load_latest("memory://run", model=model)
        assert type(error.value) is CheckpointError and "/run" in str(error.value)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="cannot be read"):
        fail(patch, "info", "step-2/manifest.json", wrong)
        # it may be there, so nothing is removed
        save("memory://run/step-2", model=model)
    assert latest("memory://run") == "memory:///run/step-2"
    with monkeypatch.context() as patch:
        fail(patch, "info", data, FileNotFoundError())
        loaded = load_latest("memory://run", model=model)
    assert loaded is not None and loaded.path == "memory:///run/step-1"
    assert list(loaded.damaged) == ["memory:///run/step-2"]
    assert loaded.new_path("step-2") == "memory:///run/step-2-again-2"


def test_manifests_of_other_kinds_in_a_store(store: Any) -> None:
    store.pipe_file("/run/tokens/manifest.json", b"{}")
    store.pipe_file("/run/empty/manifest.json", b"")
    assert latest("memory://run") is None
    store.pipe_file("/run/step-1/manifest.json", b"")
    store.pipe_file("/run/step-1/data-00001.safetensors", b"")
    with pytest.raises(CorruptError, match="its first line is not a checksum"):
        latest("memory://run")


def saved(rank: int, size: int, url: str) -> dict[str, Any]:
    model = build("fsdp")
    optimizer = adam(model)
    train(model, optimizer)
    save(url, model=model, optimizer=optimizer, asynchronous=False)
    return everything(model, optimizer)


def test_ranks_share_a_store(rank_pool: RankPool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/x"
    value = rank_pool.run(2, saved, url)[0]
    model = build("plain", 1)
    optimizer = adam(model)
    load(url, model=model, optimizer=optimizer)
    assert not differences(value, everything(model, optimizer))
    assert len(list((tmp_path / "x").iterdir())) == 3


def test_backend_of_plugin_is_used_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="acme", value="backend_plugin", group="meshwright")
    host = PluginHost.build([point], ())
    monkeypatch.setattr(plugins, "discover", lambda: host)
    model = build("plain")
    save(tmp_path / "x", model=model, backend="acme", asynchronous=False)
    assert [p.name for p in tmp_path.iterdir()] == ["x-of-acme"]
    load(tmp_path / "x", model=model, backend="acme")
    with pytest.raises(PluginError, match="did you mean 'acme'"):
        load(tmp_path / "x", model=model, backend="acne")

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(command, [*map(str, arguments), "--backend", "acme"], standalone_mode=False)

    x, y = tmp_path / "x", tmp_path / "y"
    assert run("reshard", x, y, "--ranks", 2).exception is None and (tmp_path / "y-of-acme").is_dir()
    assert "the checkpoints hold the same" in run("diff", x, y).output
    assert "all as they were saved" in run("verify", y).output and "first.weight" in run("inspect", y).output
    assert run("export", y, tmp_path / "weights").exception is None
    assert (tmp_path / "weights" / "model.safetensors").is_file()


def test_commands_reject_foreign_format(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["verify", str(tmp_path), "--backend", "dcp"], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert "load(path, backend='dcp'), then save() without it" in str(done.exception)
