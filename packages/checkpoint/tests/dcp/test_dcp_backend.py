"""Checkpoints of torch.distributed.checkpoint: in and out, and never unpickled."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import adam, build, differences, everything, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from meshwright_checkpoint import CheckpointError, CorruptError, MismatchError, load, save
from meshwright_checkpoint.dcp.safe_unpickle import safe_loads
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.testing.rank_pool import RankPool

LAYOUTS = {1: ("plain",), 2: ("fsdp", "tp", "runs"), 4: ("fsdp+tp",)}


def torch_writes(rank: int, size: int, path: str, flat: bool) -> dict[str, Any]:
    model = build("fsdp")
    optimizer = adam(model)
    train(model, optimizer)
    values = everything(model, optimizer)
    if flat:  # as torchtitan does: the model's names at the top
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        _, states = get_state_dict(model, optimizer, options=options)
        state = {**get_model_state_dict(model), "optimizer": states, "train_state": {"step": 7}}
    else:
        parameters, states = get_state_dict(model, optimizer)
        state = {"model": parameters, "optim": states, "train_state": {"step": 7, "seen": torch.arange(3)}}
    dcp.save(state, checkpoint_id=path)
    return values


def we_read(
    rank: int, size: int, path: str, layouts: tuple[str, ...]
) -> list[tuple[dict[str, Any], Any, float]]:
    result = []
    for layout in layouts:
        model = build(layout, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        extra = load(path, model=model, optimizer=optimizer, backend="dcp")
        result.append((everything(model, optimizer), extra, optimizer.param_groups[0]["lr"]))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_dcp_load_reads_torch_checkpoint_in_any_layout(
    flat: bool, rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "torch")
    (want, *_) = rank_pool.run(2, torch_writes, path, flat)
    for size, layouts in LAYOUTS.items():
        for results in rank_pool.run(size, we_read, path, layouts):
            for values, extra, lr in results:
                assert not differences(want, values)
                assert extra["train_state"]["step"] == 7 and lr == 0.01
                assert flat or extra["train_state"]["seen"].tolist() == [0, 1, 2]


def we_write(rank: int, size: int, folder: str, layouts: tuple[str, ...]) -> list[dict[str, Any]]:
    result = []
    for layout in layouts:
        model = build(layout)
        optimizer = adam(model)
        train(model, optimizer)
        handle = save(
            f"{folder}/{layout}", model=model, optimizer=optimizer, extra={"epoch": 3}, backend="dcp"
        )
        assert handle.done
        handle.wait()
        with pytest.raises(CheckpointError, match="exists already"):
            save(f"{folder}/{layout}", model=model, backend="dcp")
        with pytest.raises(UsageError, match="keep_last"):
            save(f"{folder}/other", model=model, backend="dcp", keep_last=1)
        with pytest.raises(UsageError, match=r"stores no step; leave out step=4"):
            save(f"{folder}/other", model=model, backend="dcp", step=4)
        result.append(everything(model, optimizer))
    return result


class Counting(torch.nn.Module):
    """A module with extra state."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def refused(rank: int, size: int, folder: str) -> str:
    model = build("plain")
    if rank:  # as the last stage of a pipeline
        model.add_module("counting", Counting())
    with pytest.raises(MeshwrightError) as caught:
        save(f"{folder}/refused", model=model, backend="dcp")
    return str(caught.value)


def test_dcp_save_error_raises_on_every_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    for message in rank_pool.run(2, refused, str(tmp_path), timeout=30):
        assert "counting._extra_state cannot be saved in torch's format" in message
    assert not os.listdir(tmp_path)


def torch_reads(rank: int, size: int, folder: str, layouts: list[str]) -> list[dict[str, Any]]:
    result = []
    for layout in layouts:
        model = build("fsdp", seed=1)
        optimizer = adam(model)
        parameters, states = get_state_dict(model, optimizer)
        dcp.load({"model": parameters, "optim": states}, checkpoint_id=f"{folder}/{layout}")
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
        result.append(everything(model, optimizer))
    return result


@pytest.mark.slow
def test_torch_reads_dcp_save(rank_pool: RankPool, tmp_path: Path) -> None:
    want = {}
    for size, layouts in LAYOUTS.items():
        written = rank_pool.run(size, we_write, str(tmp_path), layouts)[0]
        want.update(zip(layouts, written, strict=True))
    assert sorted(os.listdir(tmp_path)) == sorted(want)  # no leftovers
    for results in rank_pool.run(2, torch_reads, str(tmp_path), list(want)):
        for layout, values in zip(want, results, strict=True):
            assert not differences(want[layout], values), layout


def saved_by_torch(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        dcp.save(state, checkpoint_id=path)


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("where", ["metadata", "tensor", "value"])
def test_dcp_load_never_runs_pickle(where: str, tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    path = tmp_path / "torch"
    model = build("plain")
    saved_by_torch({"model": model.state_dict(), "note": Hostile(harm) if where == "value" else 1}, path=path)
    if where == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Hostile(harm)))
    if where == "tensor":
        file = next(path.glob("*.distcp"))
        data = file.read_bytes()
        file.write_bytes(
            data.replace(b"ctorch._utils\n_rebuild_tensor_v2", b"ctorch.serialization\nload_______")
        )
    if where == "value":  # it is left out
        with pytest.warns(UserWarning, match="not plain data, which are left out: note"):
            load(path, model=model, backend="dcp")
    else:
        with pytest.raises(CorruptError, match=r"refused|damaged"):
            load(path, model=model, backend="dcp")
    assert not harm.exists()


@pytest.mark.slow
def test_damaged_dcp_metadata_raise_checkpoint_error_only(tmp_path: Path) -> None:
    path = tmp_path / "torch"
    model = build("plain")
    saved_by_torch({"model": model.state_dict()}, path=path)
    whole = (path / ".metadata").read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole[: generator.randrange(len(whole))] if generator.random() < 0.3 else whole)
        for _ in range(generator.randrange(1, 4)):
            if damaged:
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        (path / ".metadata").write_bytes(damaged)
        with suppress(CheckpointError):
            load(path, model=model, backend="dcp")
    for data in (
        b"",
        b"\x80\x04",
        b"\x80\x04r\xff\xff\xff\x7f.",
        pickle.dumps(Hostile(tmp_path)),
        b"\x82\x01.",
    ):
        with pytest.raises(CorruptError):
            safe_loads(data, "here")


def doubled(times: int) -> bytes:
    """A tuple of two that is the same tuple of two, and so on."""
    return b"(t" + b"q\x000h\x00h\x00\x86" * times


def filled_later(times: int) -> bytes:
    """The same of lists that are filled after they were put into others."""
    lists = b"".join(b"]q%c0" % number for number in range(times))
    filled = b"".join(b"h%ch%cah%ca0" % (n, n - 1, n - 1) for n in range(times - 1, 0, -1))
    return lists + filled + b"h%c" % (times - 1)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02}" + doubled(22) + b"K\x01s.",
        b"\x80\x02}(" + doubled(22) + b"K\x01u.",
        b"\x80\x02(" + doubled(22) + b"K\x01d.",
        b"\x80\x04\x8f(" + doubled(22) + b"\x90.",
        b"\x80\x04(" + doubled(22) + b"\x91.",
        b"\x80\x02" + doubled(22) + b".",
        b"\x80\x02" + filled_later(22) + b".",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02" + b"]" * 300 + b"a" * 299 + b".",
    ],
    ids=["set item", "set items", "dict", "add items", "frozenset", "tuple", "lists", "itself", "deep"],
)
def test_a_value_that_is_large_when_it_is_written_out_is_refused(pickled: bytes) -> None:
    with pytest.raises(CorruptError, match=r"too (large|often|deep)"):
        safe_loads(pickled, "here")
    # what is shared without growing is read
    shared = ("name", (1, 2))
    assert safe_loads(pickle.dumps([shared] * 100 + [{shared: 1}]), "here") == [shared] * 100 + [{shared: 1}]


ORDERED, SIZE, RECORD = (
    b"c%b\n" % name
    for name in (
        b"collections\nOrderedDict",
        b"torch\nSize",
        b"torch.distributed.checkpoint.metadata\nStorageMeta",
    )
)
LONG = b"]q\x00(" + b"K\x01" * 101 + b"e0"
MANY = b"}q\x00(" + b"".join(b"K%cK\x01" % number for number in range(101)) + b"u0"


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (ORDERED + b")" + b"2\x86" * 45 + b"N\x86\x85\x85R.", "OrderedDict is made with arguments"),
        (LONG + SIZE + b"h\x00\x85R.", "size is too large"),
        (LONG + SIZE + b"h\x00\x85\x81.", "size is too large"),
        (LONG + RECORD + b"h\x00R.", "arguments of a call"),
        (LONG + RECORD + b"(" + b"K\x01" * 101 + b"t\x81.", "arguments of a call"),
        (MANY + RECORD + b")Rh\x00b.", "attributes of a StorageMeta are too many"),
        (MANY + b"]h\x00b.", "attributes of a value that has none"),
    ],
    ids=[
        "hashed",
        "size",
        "new size",
        "list of arguments",
        "arguments",
        "attributes",
        "attributes of a list",
    ],
)
def test_a_call_that_hashes_or_copies_much_is_refused(pickled: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        safe_loads(b"\x80\x02" + pickled, "here")


def test_an_ordered_dict_and_a_size_are_read() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    state.clear()
    state["weight"] = torch.Size([3, 4])
    # with the attribute that torch gives it
    assert state._metadata
    read = safe_loads(pickle.dumps(state), "here")
    assert read == {"weight": (3, 4)} and not vars(read)


def test_dcp_metadata_are_measured_before_they_are_read(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptError, match="1099511627776 bytes; metadata have at most"):
        load(tmp_path, model=build("plain"), backend="dcp")


def test_dcp_load_names_missing_parts(tmp_path: Path) -> None:
    model = build("plain")
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        load(tmp_path, model=model, backend="dcp")
    saved_by_torch(
        {"model": {"first.weight": torch.zeros(36, 16), "other": torch.ones(1)}},
        path=tmp_path / "part",
    )
    with pytest.raises(MismatchError, match=r"missing \(11\): scale, first.bias.*unexpected \(1\): other"):
        load(tmp_path / "part", model=model, backend="dcp")
    with pytest.raises(CheckpointError, match=r"no manifest.json; .*backend=\"dcp\""):  # never sniffed
        load(tmp_path / "part", model=model)
    numbered = {"model": model.state_dict(), "optim": {"state": {0: {"exp_avg": torch.zeros(36, 16)}}}}
    saved_by_torch(numbered, path=tmp_path / "numbered")
    with pytest.raises(
        MismatchError, match=r"the optimizer \(its states have numbers for names.*get_optimizer_state"
    ):
        load(tmp_path / "numbered", model=model, optimizer=adam(model), backend="dcp")
