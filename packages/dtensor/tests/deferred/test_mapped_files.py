"""The files of deferred initialisation: on a disk, never in memory, and a clear error when there is no room."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright_dtensor.deferred import materialize
from meshwright_dtensor.deferred.mapped_files import choose_directory, file_system
from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.testing.rank_pool import RankPool

pytestmark = pytest.mark.host("files that the host maps")


def test_full_disk_raises_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with deferred_init(directory=tmp_path), pytest.raises(MeshwrightError) as caught:
        torch.empty(100, 1000)
    text = str(caught.value)
    assert (
        "400000 bytes" in text and str(tmp_path) in text and "No space left" in text and "(100, 1000)" in text
    )
    assert "MESHWRIGHT_INIT_DIR" in text and "\n" not in text
    assert list(tmp_path.iterdir()) == []


def limited(rank: int, world_size: int, directory: str) -> str:
    """The message when files may not grow beyond 1 MB: a limit that the kernel enforces."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with deferred_init(directory=directory):
            torch.empty(1 << 16)
            torch.empty(1 << 20)
    except MeshwrightError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


def test_kernel_limit_raises_clear_error(rank_pool: RankPool, tmp_path: Path) -> None:
    (message,) = rank_pool.run(1, limited, str(tmp_path))
    assert "4194304 bytes" in message
    assert list(tmp_path.iterdir()) == []


def test_free_space_is_checked_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with deferred_init(directory=tmp_path):
        value = torch.ones(1 << 16)
        with pytest.raises(MeshwrightError, match="No space left"):
            torch.empty(1 << 50)
    assert is_deferred(value)
    assert bool((value == 1).all())


MOUNTS = """\
22 27 0:21 / / rw,relatime - ext4 /dev/vda rw
23 22 0:22 / /tmp rw - tmpfs tmpfs rw
24 22 0:23 / /tmp/big\\040disk rw shared:1 - xfs /dev/vdb rw
25 22 0:24 / /tmporary rw - btrfs /dev/vdc rw
26 22 0:25 / /over rw - xfs /dev/vdd rw
27 22 0:26 / /over rw - tmpfs tmpfs rw
"""


def test_file_system_is_of_longest_and_last_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    want = {"/": "ext4", "/usr/x": "ext4", "/tmp": "tmpfs", "/tmp/x": "tmpfs", "/tmp/big disk/x": "xfs"}
    want |= {"/tmporary": "btrfs", "/tmporar": "ext4", "/over/x": "tmpfs"}
    assert {place: file_system(Path(place), table) for place in want} == want
    assert file_system(Path("/"), tmp_path / "absent") is None


def test_directory_in_memory_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {str(tmp_path): "tmpfs"}
    monkeypatch.setattr(
        "meshwright_dtensor.deferred.mapped_files.file_system",
        lambda directory: kinds.get(str(directory), "ext4"),
    )
    with (
        pytest.raises(UsageError, match="is on tmpfs, which is memory itself"),
        deferred_init(directory=tmp_path),
    ):
        pass
    monkeypatch.setenv("MESHWRIGHT_INIT_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"MESHWRIGHT_INIT_DIR=.* is on tmpfs"), deferred_init():
        pass
    monkeypatch.delenv("MESHWRIGHT_INIT_DIR")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.chdir("/")
    room = {"/var/tmp": 200, "/": 100}
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=room[str(place)]))
    assert choose_directory() == Path("/var/tmp")
    room["/"] = 300
    assert choose_directory() == Path("/")
    kinds["/var/tmp"] = "ramfs"
    kinds["/"] = "tmpfs"
    with (
        pytest.raises(UsageError, match=r"found no disk.*tmpfs.*ramfs.*set MESHWRIGHT_INIT_DIR"),
        deferred_init(),
    ):
        pass


def test_wrong_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no directory"), deferred_init(directory=tmp_path / "absent"):
        pass
    with pytest.raises(UsageError, match="min_bytes=0"), deferred_init(min_bytes=0):
        pass
    assert materialize.MIN_BYTES == 65536


def test_environment_variable_sets_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_INIT_DIR", str(tmp_path))
    with deferred_init():
        value = torch.empty(1 << 16)
        assert is_deferred(value) and str(tmp_path) in Path("/proc/self/maps").read_text()
