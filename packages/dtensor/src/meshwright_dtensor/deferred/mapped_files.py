"""Tensor memory in unlinked files on a disk: the kernel may write it out and drop it when memory is short."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from meshwright_dtensor.deferred.private_pages import make_private
from meshwright_dtensor.devices import HOST, on_host
from meshwright_dtensor.errors import MeshwrightError, UsageError

ENVIRONMENT = "MESHWRIGHT_INIT_DIR"
PREFIX = "meshwright-init-"
HOLLOW = f"{PREFIX}hollow-"
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
# Names by which torch opens a file that has none any more. It keeps them with the storage, and the dots tell ours from others'.
_BY_NUMBER, _HOLLOW_BY_NUMBER, _SHARED_BY_NUMBER = (
    "/proc/self/./fd/",
    "/proc/self/././fd/",
    "/proc/self/./././fd/",
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def file_system(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the file system of `directory` ("ext4", "tmpfs"), or None if the system does not say.

    It is read from the mount table, `mounts` in the format of proc(5); the last mount on the longest path counts.
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    place = os.path.realpath(directory)
    best: tuple[int, str] | None = None
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        # blanks are written \040
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if place == point or place.startswith(point.rstrip("/") + "/"):
            kind = fields[fields.index("-", 6) + 1]
            if best is None or len(point) >= best[0]:
                best = (len(point), kind)
    return None if best is None else best[1]


def choose_directory(given: str | os.PathLike[str] | None = None) -> Path:
    """The directory for mapped files: `given`, or MESHWRIGHT_INIT_DIR, or the default directory with the most room.

    Never one on a file system in memory. Raises UsageError if the given directory, or every default one, is unusable.
    """
    source = "directory"
    if given is None and os.environ.get(ENVIRONMENT):
        given, source = os.environ[ENVIRONMENT], ENVIRONMENT
    if given is not None:
        reason = _unfit(Path(given))
        if reason:
            raise UsageError(f"{source}={str(given)!r} {reason}; name a writable directory on a disk")
        return Path(given)
    tried, disks = [], []
    for place in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", os.getcwd())):
        reason = _unfit(Path(place))
        if reason is None:
            disks.append(Path(place))
        else:
            tried.append(f"{place!r} {reason}")
    if disks:
        # the first of several on one disk
        return max(disks, key=lambda disk: shutil.disk_usage(disk).free)
    raise UsageError(
        f"deferred_init found no disk for its files ({'; '.join(tried)}); set {ENVIRONMENT} to a writable directory on one"
    )


def _unfit(directory: Path) -> str | None:
    if not directory.is_dir():
        return "is no directory"
    kind = file_system(directory)
    if kind in IN_MEMORY:
        return f"is on {kind}, which is memory itself"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "is not writable"
    return None


@dataclass
class MappedFiles:
    """Makes tensors in files of one directory. A file is unlinked once its tensor exists, and freed with its storage.

    hollow: files take no room on the disk, and nothing may be written into them.
    made: called with each new storage and the number of its open file, by the rank that builds for all ranks of its host.
    """

    directory: Path
    hollow: bool = False
    made: Callable[[torch.UntypedStorage, int], None] | None = None

    def zeros(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zero CPU tensor of `shape` and `strides` (elements), backed by a file of its own.

        The space is taken at once, unless hollow: a full disk is a MeshwrightError here, not a bus error at some later
        write.
        """
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        nbytes = 0 if 0 in shape else span * dtype.itemsize
        number, name = tempfile.mkstemp(prefix=HOLLOW if self.hollow else PREFIX, dir=self.directory)
        try:
            try:
                # without a name before it has a size: a process that is killed leaves no file
                if _opens_by_number():
                    os.unlink(name)
                self._reserve(number, nbytes)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                free = shutil.disk_usage(self.directory).free
                raise MeshwrightError(
                    f"deferred_init could not take {nbytes} bytes in {str(self.directory)!r} for a {dtype} tensor of shape "
                    f"{tuple(shape)}: {error.strerror} ({free} bytes free there); free some, or set {ENVIRONMENT} to a "
                    "larger disk"
                ) from error
            storage = self._storage(number, name, nbytes)
        finally:
            os.close(number)
            if not _opens_by_number():
                os.unlink(name)
        return torch.empty(0, dtype=dtype, device=HOST).set_(storage, 0, tuple(shape), tuple(strides))  # type: ignore[arg-type]

    def _storage(self, number: int, name: str, nbytes: int) -> torch.UntypedStorage:
        if _opens_by_number():
            start = _BY_NUMBER if self.made is None else _SHARED_BY_NUMBER
            name = f"{_HOLLOW_BY_NUMBER if self.hollow else start}{number}"
        storage: Any = torch.UntypedStorage.from_file(name, True, nbytes)
        if self.made is not None and nbytes:
            self.made(storage, number)
        return cast(torch.UntypedStorage, storage)

    def _reserve(self, number: int, nbytes: int) -> None:
        if self.hollow:
            return os.truncate(number, nbytes)
        if sys.platform != "win32" and hasattr(os, "posix_fallocate"):
            try:
                return os.posix_fallocate(number, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        if shutil.disk_usage(self.directory).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(number, nbytes)


def opened(number: int, nbytes: int) -> torch.UntypedStorage:
    """The storage of a file that another rank has made; what this process writes there is its own. Raises OSError."""
    storage: Any = torch.UntypedStorage.from_file(f"{_SHARED_BY_NUMBER}{number}", True, nbytes)
    make_private(storage, number)
    return cast(torch.UntypedStorage, storage)


def _opens_by_number() -> bool:
    """Whether a file without a name can be opened again by the number under which it is open (Linux)."""
    return sys.platform.startswith("linux") and os.path.isdir("/proc/self/fd")


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` is one of these files."""
    name = _file_name(tensor)
    numbered = name.startswith((_BY_NUMBER, _HOLLOW_BY_NUMBER, _SHARED_BY_NUMBER))
    return numbered or os.path.basename(name).startswith(PREFIX)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` is a file that nothing was written into."""
    name = _file_name(tensor)
    return name.startswith(_HOLLOW_BY_NUMBER) or os.path.basename(name).startswith(HOLLOW)


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether the file of a storage is one that the ranks of a host share."""
    return (storage.filename or "").startswith(_SHARED_BY_NUMBER)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is an ordinary dense tensor, not a fake, distributed or quantised one."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized


def _file_name(tensor: torch.Tensor) -> str:
    if not is_plain(tensor) or not on_host(tensor.device):
        return ""
    return tensor.untyped_storage().filename or ""
