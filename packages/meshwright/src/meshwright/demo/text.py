"""Byte-level text, the same on every machine with the same Python: a file, or the standard library's own sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from meshwright_dtensor.errors import UsageError

# bytes: enough for any run of the demo, read in well under a second
LIMIT = 8 << 20


def read_text(path: str | Path | None = None, *, at_least: int = 1) -> Tensor:
    """The bytes of `path`, or of the standard library's sources, as a uint8 tensor of at most `LIMIT` elements.

    at_least: how many bytes the caller needs.
    Raises:
        UsageError: the file is missing, unreadable or too short.
    """
    data = _standard_library() if path is None else _file(Path(path))
    if len(data) < at_least:
        raise UsageError(
            f"--text {path} has {len(data)} bytes: training needs at least {at_least}; "
            "give a longer file or a smaller --sequence-length"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LIMIT)
    except OSError as error:
        raise UsageError(
            f"--text {path} cannot be read ({error.strerror}); give a readable text file"
        ) from error


def _standard_library() -> bytes:
    """The top-level modules of the standard library, in order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise UsageError(f"there are no sources in {folder}; give a file with --text")
    data = bytearray()
    for file in files:
        data += file.read_bytes()
        if len(data) >= LIMIT:
            break
    return bytes(data[:LIMIT])
