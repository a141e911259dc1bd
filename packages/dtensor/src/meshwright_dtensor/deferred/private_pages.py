"""Private mappings of files that the ranks of a host share: what a process writes there is its own, in ordinary memory.

The rank that builds writes into the files, so that the others see its values. Each other rank maps a file privately from the
start, and the builder exchanges its mappings for private ones when the model is built. An address stays the same throughout.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright_dtensor._torch.core import weak_storage

_FIXED, _NO_RESERVE = 0x10, 0x4000
_MAY_MOVE, _TO_ADDRESS = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
_FEW = 16
"""Spare mappings that are kept before those of freed storages are ended."""
_LARGE = 256 << 20
"""Bytes of new spare mappings after which those of freed storages are ended: they keep their files."""


@functools.cache
def libc() -> Any:
    """The C library, with the signatures of its calls for mappings."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mremap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _checked(result: int | None) -> int:
    if result is None or result == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _map_private(number: int, nbytes: int, address: int | None) -> int:
    """Map the file `number` privately, at `address` in place of what is mapped there, or anywhere. Raises OSError."""
    flags = mmap.MAP_PRIVATE | _NO_RESERVE | (0 if address is None else _FIXED)
    return _checked(libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, number, 0))


def make_private(storage: torch.UntypedStorage, number: int) -> None:
    """Exchange the shared mapping of a storage for a private one of the file `number`. Raises OSError."""
    _map_private(number, storage.nbytes(), storage.data_ptr())


def has_private_writes(storage: torch.UntypedStorage) -> bool:
    """Whether this process has written into a private mapping since it was made or last dropped; True if it cannot be told."""
    size = mmap.PAGESIZE
    first, last = storage.data_ptr() // size, -(-(storage.data_ptr() + storage.nbytes()) // size)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
            pages.seek(8 * first)
            entries = pages.read(8 * (last - first))
    except OSError:
        return True
    if len(entries) != 8 * (last - first):
        return True
    words = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    # the sign bit is that of a present page
    here = (words < 0) | (words.bitwise_and(_SWAPPED) != 0)
    return bool((here & (words.bitwise_and(_OF_FILE) == 0)).any())


class SpareMappings:
    """Second, private mappings of the builder's files. `exchange` puts each in the place of the first one.

    So no file number is kept open for each tensor of a model. A spare mapping takes addresses only.
    """

    def __init__(self) -> None:
        self._spares: list[tuple[Callable[[], torch.UntypedStorage | None], int, int]] = []
        self._limit, self._new_bytes = _FEW, 0

    def add(self, storage: torch.UntypedStorage, number: int) -> None:
        """Make the spare mapping of a storage in the file `number`. Raises OSError."""
        nbytes = storage.nbytes()
        self._spares.append((weak_storage(storage), _map_private(number, nbytes, None), nbytes))
        self._new_bytes += nbytes
        if len(self._spares) > self._limit or self._new_bytes > _LARGE:
            self._purge()

    def _purge(self) -> None:
        living = []
        for find, address, nbytes in self._spares:
            if find() is None:
                libc().munmap(address, nbytes)
            else:
                living.append((find, address, nbytes))
        self._spares = living
        self._limit, self._new_bytes = max(_FEW, 2 * len(living)), 0

    def exchange(self) -> None:
        """Make every living storage private to this process; its values stay."""
        self._purge()
        for find, address, nbytes in self._spares:
            storage = find()
            if storage is not None:
                _checked(libc().mremap(address, nbytes, nbytes, _MAY_MOVE | _TO_ADDRESS, storage.data_ptr()))
        self._spares = []
