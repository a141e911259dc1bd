"""Sequential writes, direct and through the page cache: correct bytes, and errors are raised."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright_checkpoint import latest
from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.io import direct_write
from meshwright_checkpoint.io.direct_write import ALIGN, CHUNK, LARGE, Writer
from meshwright_checkpoint.io.host_memory import aligned_memory

KNOWS = hasattr(os, "O_DIRECT")


class Calls:
    """Replaces os.pwrite: counts direct and cached bytes, and injects errors."""

    def __init__(self, wrong: str = "") -> None:
        self.around = self.through = 0
        self.wrong, self.pwrite = wrong, os.pwrite

    def __call__(self, fd: int, data: memoryview, at: int) -> int:
        """See os.pwrite."""
        around = KNOWS and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if self.wrong in ("EINVAL", "EFAULT") and around and at:
            raise OSError(getattr(errno, self.wrong), self.wrong)
        if self.wrong == "full" and at:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.wrong == "short" and len(data) > ALIGN:
            data = data[: len(data) // 3 if not around else len(data) // 3 // ALIGN * ALIGN or ALIGN]
        count = self.pwrite(fd, data, at)
        if around:
            self.around += count
        else:
            self.through += count
        return count


def writes_of(rng: random.Random, file: memoryview) -> list[memoryview]:
    """The file in pieces; some have the same alignment in memory as in the file, others do not."""
    pieces, at = [], 0
    while at < len(file):
        count = rng.choice([1, 100, ALIGN, ALIGN + 1, LARGE, LARGE + 4097, CHUNK, 2 * CHUNK + 5])
        piece = file[at : at + count]
        pieces.append(piece if rng.random() < 0.7 else memoryview(bytes(piece)))
        at += count
    return pieces


def put(path: Path, pieces: list[memoryview]) -> None:
    writer = Writer(path)
    try:
        for piece in pieces:
            writer.write(piece)
    except BaseException:
        writer.close(durable=False)
        raise
    writer.close()


@pytest.fixture(scope="module")
def file() -> memoryview:
    memory = aligned_memory(5 * CHUNK + 1234)
    memory.numpy()[:] = np.random.default_rng(0).integers(0, 256, memory.numel(), dtype=np.uint8)
    return bytes_of_tensor(memory)


@pytest.mark.parametrize("wrong", ["", "short", "EINVAL", "EFAULT"])
@pytest.mark.parametrize("seed", range(2))
def test_writer_writes_given_bytes(
    seed: int, wrong: str, file: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(wrong)
    monkeypatch.setattr(os, "pwrite", calls)
    put(tmp_path / "x", writes_of(random.Random(seed), file))
    assert (tmp_path / "x").read_bytes() == file
    if wrong.startswith("E") and calls.around:
        assert calls.through


def test_write_uses_cache_without_direct_writes(
    file: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    monkeypatch.setattr(os, "pwrite", calls)
    monkeypatch.setattr(direct_write, "_set_direct", lambda fd, on=True: False)
    put(tmp_path / "x", writes_of(random.Random(0), file))
    assert (tmp_path / "x").read_bytes() == file and calls.around == 0


def test_large_files_bypass_the_cache(
    file: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe").touch()
    fd = os.open(tmp_path / "probe", os.O_WRONLY)
    can = direct_write._set_direct(fd)
    os.close(fd)
    if not can:
        pytest.skip("the file system of temporary files cannot")
    copied: list[int] = []
    copy = Writer._copy
    monkeypatch.setattr(Writer, "_copy", lambda self, some: (copied.append(some.size), copy(self, some)))
    for nbytes, around, most in ((len(file), True, ALIGN), (CHUNK - 1, False, CHUNK)):
        calls = Calls()
        monkeypatch.setattr(os, "pwrite", calls)
        copied.clear()
        # memory that starts a byte after an aligned address is never written in place
        pieces = [file[:100], file[100:nbytes]] if around else [file[1 : nbytes + 1]]
        put(tmp_path / f"{nbytes}", pieces)
        assert (calls.around > nbytes - ALIGN) == around
        assert sum(copied) <= 2 * most  # the rest was written without a copy


def test_write_error_is_raised(file: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", Calls("full"))
    for pieces in ([file], [file[: CHUNK + ALIGN]], [memoryview(bytes(file[: CHUNK + 5]))]):
        with pytest.raises(OSError, match="No space left"):
            put(tmp_path / f"x-{len(pieces[0])}", pieces)


ENDS = """
import sys, torch
from meshwright_checkpoint import save
model = torch.nn.ParameterDict({f"w{i}": torch.full((1 << 19,), float(i)) for i in range(40)})
save(sys.argv[1] + "/step-1", model=model)
"""


@pytest.mark.slow
def test_process_finishes_save_before_exit(tmp_path: Path) -> None:
    done: Any = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr
    assert latest(tmp_path) == str(tmp_path / "step-1")


FAILS = (
    """
import sys
from meshwright_checkpoint.io import direct_write
def full(*args):
    raise OSError(28, "No space left on device")
direct_write.Writer.write = full
"""
    + ENDS
)


@pytest.mark.slow
@pytest.mark.parametrize("waited", [False, True])
def test_unreported_save_error_is_printed_at_exit(waited: bool, tmp_path: Path) -> None:
    code = FAILS
    if waited:
        code = (
            FAILS.replace("\nsave(", "\nhandle = save(") + "try:\n    handle.wait()\nexcept Exception: pass\n"
        )
    done: Any = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ("step-1 failed: [Errno 28] No space left on device" in done.stderr) is not waited
    assert latest(tmp_path) is None
