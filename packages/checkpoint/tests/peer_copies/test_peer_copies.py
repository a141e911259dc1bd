"""Which copies in memory a run goes on from, and which it never does."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from models import Block, build

from meshwright_checkpoint import CheckpointError
from meshwright_checkpoint.peer_copies.copies import PeerCopies
from meshwright_checkpoint.peer_copies.exchange import holders
from meshwright_checkpoint.peer_copies.host_folder import LEFT_SECONDS, HostFolder
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_dtensor.testing.rank_pool import RankPool


def begin(folder: Path, host: str = "memory") -> PeerCopies:
    (folder / host).mkdir(parents=True, exist_ok=True)
    return PeerCopies(folder / "run", 1, folder / host)


def model_of(step: int) -> Block:
    """A model whose values tell the step."""
    model = Block()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model


def put(copies: PeerCopies, *steps: int, saved: int | None = None) -> None:
    for step in steps:
        copies.put(model_of(step), None, {"step": step, "more": torch.full((3,), float(step))}, step, saved)
    copies.wait()


def loaded(copies: PeerCopies, saved: int | None = None) -> tuple[int | None, list[str]]:
    """The step that is loaded, and why newer copies are not used."""
    held, reasons = copies.newest(saved, saved)
    if held is None:
        return None, reasons
    model = Block()
    extra = copies.load(held, model, None)
    step: int = extra["step"]
    assert all(bool((parameter == step).all()) for parameter in model.parameters())
    assert torch.equal(extra["more"], torch.full((3,), float(step)))
    return step, reasons


def files(folder: Path, step: int) -> list[Path]:
    return sorted(folder.glob(f"memory/*/*/*-{step:012d}-*"))


def test_the_newest_copy_is_loaded_and_no_more_than_two_are_held(tmp_path: Path) -> None:
    copies = begin(tmp_path)
    assert loaded(copies) == (None, [])
    put(copies, 1, 2, 3)
    assert not files(tmp_path, 1) and files(tmp_path, 2) and files(tmp_path, 3)
    assert loaded(begin(tmp_path)) == (3, [])
    # a checkpoint of a later step is newer
    assert begin(tmp_path).newest(4, 4) == (None, [])
    copies.forget()
    last = begin(tmp_path)
    assert loaded(last) == (None, [])
    # the folder goes with the last process that uses it
    used = last._folder.path / "lock-of-another"
    used.touch()
    last._folder.close()
    assert used.exists()
    used.unlink()
    last._folder.close()
    assert not last._folder.path.exists()


@pytest.mark.parametrize("at", ["header", "value", "note", "tail"])
def test_a_flipped_bit_is_found_and_the_copy_before_it_is_used(tmp_path: Path, at: str) -> None:
    put(begin(tmp_path), 1, 2)
    (path,) = files(tmp_path, 2)
    data = bytearray(path.read_bytes())
    body = int.from_bytes(data[-16:-8], "little")
    place = {"header": 20, "value": body - 5, "note": body + 10, "tail": len(data) - 12}[at]
    data[place] ^= 1
    path.write_bytes(data)
    step, reasons = loaded(begin(tmp_path))
    assert step == 1 and "the copy of step 2 is damaged" in reasons[0] and path.name in reasons[0]


@pytest.mark.parametrize("lacks", ["saved", "types", "optimizer"])
def test_a_copy_of_another_release_is_left_out(tmp_path: Path, lacks: str) -> None:
    put(begin(tmp_path), 1, 2)
    (path,) = files(tmp_path, 2)
    data = path.read_bytes()
    body = int.from_bytes(data[-16:-8], "little")
    note = json.loads(data[body:-48])
    del note[lacks]
    text = json.dumps(note).encode()
    tail = hashlib.sha256(text).digest() + struct.pack("<QQ", body, len(text))
    path.write_bytes(data[:body] + text + tail)
    step, reasons = loaded(begin(tmp_path))
    assert (
        step == 1
        and f"the copy of step 2 is damaged, or of another version: KeyError: '{lacks}'" in reasons[0]
    )


def test_torn_copies_are_not_used(tmp_path: Path) -> None:
    put(begin(tmp_path), 1, 2)
    (path,) = files(tmp_path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert loaded(begin(tmp_path))[0] == 1
    # a process was killed before it was complete
    partial = path.with_name(path.name.replace("000002-", "000003-") + ".partial")
    partial.write_bytes(whole)
    assert loaded(begin(tmp_path)) == (1, []) and not partial.exists()


def test_copies_of_another_run_are_not_used(tmp_path: Path) -> None:
    put(begin(tmp_path), 1)
    shutil.rmtree(tmp_path / "run")
    # a new run in a folder of the same name
    assert loaded(begin(tmp_path)) == (None, [])
    # and what the old one has left is removed once it is old
    old = next(path.parent for path in files(tmp_path, 1))
    begin(tmp_path)
    assert old.exists()
    os.utime(old, (0, time.time() - LEFT_SECONDS - 60))
    begin(tmp_path)
    assert not old.exists()


LOCKS = "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_a_run_that_cleans_up_still_holds_its_own_lock(tmp_path: Path) -> None:
    """Without it another run of this host removes its copies after ten minutes without one."""
    copies = begin(tmp_path)
    (lock,) = copies._folder.path.glob("lock-*")
    command = [sys.executable, "-c", LOCKS, str(lock)]
    assert b"BlockingIOError" in subprocess.run(command, capture_output=True).stderr
    copies._folder._lock.release()
    lock.touch()
    assert subprocess.run(command).returncode == 0


def test_a_removed_checkpoint_takes_its_copies_with_it(tmp_path: Path) -> None:
    put(begin(tmp_path), 7, saved=5)
    step, reasons = loaded(begin(tmp_path), saved=2)
    assert step is None and "with a checkpoint of step 5, which is not there" in reasons[0]
    assert loaded(begin(tmp_path), saved=None)[0] is None
    assert loaded(begin(tmp_path), saved=6) == (7, [])
    # the checkpoint of step 5 is there, and damaged
    held, reasons = begin(tmp_path).newest(2, 5)
    assert held is not None and held.generation.step == 7 and reasons == []


def test_a_later_start_is_newer_than_a_later_step(tmp_path: Path) -> None:
    put(begin(tmp_path), 8)
    (path,) = files(tmp_path, 8)
    data = path.read_bytes()
    path.unlink()
    # the host that holds it is cut off, and the run goes on from an earlier step
    put(begin(tmp_path), 3)
    path.write_bytes(data)
    assert loaded(begin(tmp_path)) == (3, []) and not path.exists()
    # alone it would be used
    begin(tmp_path).forget()
    path.write_bytes(data)
    assert loaded(begin(tmp_path)) == (8, [])


def test_no_room_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = begin(tmp_path)
    put(copies, 1)

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CheckpointError, match=r"no room for .* MiB of a copy \(No space left"):
            put(copies, 2)
        assert not list(tmp_path.glob("memory/*/*/*.partial"))
    assert loaded(begin(tmp_path)) == (1, [])
    with monkeypatch.context() as patch:
        patch.setattr(HostFolder, "room", lambda folder: 1000)
        with pytest.raises(CheckpointError, match=r"peer_copies needs 2.0 MiB in .* room for 0\.0 MiB"):
            begin(tmp_path).check_room(model_of(0), None)
    begin(tmp_path).check_room(model_of(0), None)


def test_the_room_for_states_that_are_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(1024, 1024)
    # the parameters alone are 4 MiB, a copy of them and two states 13 MiB, and there are two copies
    monkeypatch.setattr(HostFolder, "room", lambda folder: 20 << 20)
    begin(tmp_path).check_room(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        CheckpointError, match=r"needs 26\.0 MiB in .*, with the states that the optimizer will have"
    ):
        begin(tmp_path).check_room(model, optimizer)
    assert not optimizer.state and torch.equal(model.weight, model.weight.detach())

    class Own(torch.optim.SGD):
        pass

    begin(tmp_path).check_room(model, Own(model.parameters(), lr=0.1))
    assert "the states of Own are not known before its first step" in caplog.text


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    next((tmp_path / "memory").iterdir()).chmod(0o777)
    with pytest.raises(CheckpointError, match="is not a folder of this user alone"):
        begin(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        PeerCopies(tmp_path / "run", 1, tmp_path / "nothing")
    (tmp_path / "run" / ".elastic.json").write_text('{"run": "../../x", "starts": 1}')
    with pytest.raises(CheckpointError, match="is damaged"):
        begin(tmp_path)


def test_each_file_has_a_holder_on_another_host() -> None:
    assert holders(["a", "a"]) == [None, None]
    assert holders(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    # of hosts with other numbers of ranks, and in any order
    assert holders(["a", "b", "a", "c", "a"]) == [1, 3, 1, 0, 1]


def number_of_hosts(rank: int, size: int, folder: str, memory: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank))
        return begin(Path(folder), memory.format(rank)).hosts


def test_nodes_that_share_their_memory_are_one_host(rank_pool: RankPool, tmp_path: Path) -> None:
    """Their files would have the same names, and two copies there would be lost together."""
    assert rank_pool.run(2, number_of_hosts, str(tmp_path), "memory") == [1, 1]
    assert rank_pool.run(2, number_of_hosts, str(tmp_path), "memory-{}") == [2, 2]


def damaged(rank: int, size: int, folder: str, step: int) -> Any:
    """Copies of two hosts, of which one file of each is damaged; then what is loaded, and in which layout."""
    path = Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank))
        copies = begin(path, f"memory-{rank}")
        if step:
            put(copies, step)
            return None
        held, reasons = copies.newest(None, None)
        if held is None:
            return reasons
        model: Any = build("fsdp", seed=3)
        extra = copies.load(held, model, None)
        return extra["step"], float(model.first.weight.full_tensor().mean())


def gathered(rank: int, size: int, folder: str) -> list[str]:
    """The texts that all ranks send to all for a copy, and for the next one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank))
        copies = begin(Path(folder), f"memory-{rank}")
        texts: list[str] = []
        patch.setattr(Ranks, "gather", lambda ranks, value: texts.append(str(value)))
        put(copies, 1, 2)
    return texts


def test_no_texts_of_all_ranks_are_sent_for_a_copy(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(2, gathered, str(tmp_path)) == [[], []]


def test_the_copy_of_another_host_replaces_a_damaged_one(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, damaged, str(tmp_path), 4)
    damaged_file, lost_file = (
        next(tmp_path.glob(f"memory-0/*/*/*-{rank}-of-2.{whose}"))
        for rank, whose in ((0, "own"), (1, "peer"))
    )
    damaged_file.write_bytes(damaged_file.read_bytes()[:-100])
    lost_file.unlink()
    assert rank_pool.run(2, damaged, str(tmp_path), 0) == [(4, 4.0)] * 2
    for path in tmp_path.glob("memory-1/*/*/*-0-of-2.peer"):
        path.unlink()
    for reasons in rank_pool.run(2, damaged, str(tmp_path), 0):
        assert "step 4 is damaged" in reasons[0]
    for path in tmp_path.glob("memory-0/*/*/*.own"):
        path.unlink()
    for reasons in rank_pool.run(2, damaged, str(tmp_path), 0):
        assert reasons == ["the copy of step 4 lacks the file of rank 0"]
