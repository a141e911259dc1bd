"""Direct reads of uncached files: the same bytes and the same errors as cached reads, for any shapes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright_checkpoint import CheckpointError, CorruptError, load, save
from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.io.direct_read import ALIGN, LARGE, DirectReader, pages_nbytes
from meshwright_checkpoint.io.host_memory import aligned_memory
from meshwright_checkpoint.storage.file_reader import Reader

NBYTES = 3 * LARGE + 1234


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, bytes]:
    data = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    forget(tmp_path / "x")
    reader = Reader(tmp_path / "x")
    there = reader.prefers_direct(0, NBYTES)
    reader.close()
    if not there:
        pytest.skip("the file system of temporary files cannot")
    return tmp_path / "x", data


class Calls:
    """Replaces os.preadv: counts direct and cached bytes, and injects errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: int = 0, short: int = 0) -> None:
        self.around = self.through = 0
        self.wrong, self.short, self.preadv = wrong, short, os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: Any, offset: int) -> int:
        """See os.preadv."""
        around = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if around and self.wrong:
            raise OSError(self.wrong, "wrong")
        if around and self.short:
            buffers = [buffers[0][: self.short]]
        count = self.preadv(fd, buffers, offset)
        if around:
            self.around += count
        else:
            self.through += count
        return count


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, NBYTES), (4097, 2 * LARGE), (5, NBYTES - 5), (ALIGN, LARGE), (12, LARGE + 1)]
)
@pytest.mark.parametrize(("wrong", "short"), [(0, 0), (errno.EINVAL, 0), (0, 5 * ALIGN), (0, 1024)])
def test_read_pages_returns_file_bytes(
    offset: int,
    nbytes: int,
    wrong: int,
    short: int,
    file: tuple[Path, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, data = file
    calls = Calls(monkeypatch, wrong, short)
    reader = Reader(path)
    memory = aligned_memory(pages_nbytes(offset, nbytes))
    reader.read_pages(bytes_of_tensor(memory), offset, nbytes)
    reader.close()
    lead = offset % ALIGN
    assert memory[lead : lead + nbytes].numpy().tobytes() == data[offset : offset + nbytes]
    if not wrong and short != 1024:
        assert calls.around >= nbytes and calls.through == 0
    else:
        assert calls.through > nbytes - ALIGN


def test_read_errors_are_raised(file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = file
    reader = Reader(path)
    memory = bytes_of_tensor(aligned_memory(2 * NBYTES))
    with pytest.raises(CorruptError, match="ends at"):
        reader.read_pages(memory, 0, NBYTES + 1)
    Calls(monkeypatch, errno.EIO)
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        reader.read_pages(memory, 0, NBYTES)
    assert type(error.value) is CheckpointError
    reader.close()


def test_cached_pages_are_read_from_the_cache(file: tuple[Path, bytes]) -> None:
    path, data = file
    fd = os.open(path, os.O_RDONLY)
    around = DirectReader(fd)
    assert around.worthwhile(0, NBYTES) and not around.worthwhile(0, LARGE - 1)
    assert around.worthwhile(0, NBYTES)  # the question reads nothing
    assert not around.worthwhile(0, NBYTES + 1)  # the file is shorter, which the read reports
    assert os.pread(fd, NBYTES, 0) == data
    assert not around.worthwhile(0, NBYTES)
    os.close(fd)
    followed = Reader(path, follow=True)  # other programs read it too
    forget(path)
    assert not followed.prefers_direct(0, NBYTES)
    followed.close()


def test_load_bypasses_the_cache(
    file: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"odd": (1003, 701), "pages": (1024, 1024), "more": (5, 3), "halves": (1001, 1001)}
    model = torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(
                torch.randn(shape).to(torch.bfloat16 if name == "halves" else torch.float32)
            )
            for name, shape in shapes.items()
        }
    )
    save(tmp_path / "step-1", model=model, asynchronous=False)
    want = {name: value.detach().clone() for name, value in model.items()}
    for name, value in model.items():
        value.data.zero_()
        assert not torch.equal(value, want[name])
    for path in (tmp_path / "step-1").glob("*.safetensors"):
        forget(path)
    calls = Calls(monkeypatch)
    load(tmp_path / "step-1", model=model)
    assert all(torch.equal(value, want[name]) for name, value in model.items())
    large = [value.nbytes for value in want.values() if value.nbytes >= LARGE]
    assert calls.around >= sum(large) and calls.through < LARGE
    (path,) = (tmp_path / "step-1").glob("*.safetensors")
    with open(path, "r+b") as data:
        data.seek(4096 + 100_001)  # the header is one page here, and what is a multiple of pages comes first
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 4]))
    forget(path)
    calls.around = 0
    with pytest.raises(CorruptError, match="stored values of model/pages are damaged"):
        load(tmp_path / "step-1", model=model)
    assert calls.around
