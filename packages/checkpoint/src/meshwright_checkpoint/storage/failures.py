"""Errors of reading stored data: damage, which leads to an older checkpoint, and all others, which must not.

A file that is not there is damage. One that cannot be read now (no permission, too many open files, a network that does not
answer) may be whole.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_dtensor.errors import MeshwrightError

_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG})
"""Errors that say that there is no such file. Files of a checkpoint are no links."""


def is_not_there(error: BaseException) -> bool:
    """Whether an error says that there is no such file."""
    kinds = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, kinds) or (isinstance(error, OSError) and error.errno in _NOT_THERE)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn errors of storage in the block into errors of this package.

    Raises:
        CorruptError: what is read is not there.
        CheckpointError: it cannot be read for another reason, and may be whole.
    """
    try:
        yield
    except MeshwrightError:
        raise
    # storage libraries may raise anything, and the other ranks must be told
    except Exception as error:
        why = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        kind = CorruptError if is_not_there(error) else CheckpointError
        raise kind(f"{where} cannot be read: {why}") from error
