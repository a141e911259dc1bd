"""The record of a run in its folder of checkpoints: a name that no other run has, and how often it was started.

Copies in memory carry both. So a folder that was removed, and is used for a new run, never goes on from copies of the old one, and
of two copies that a run has made after different starts the later start is that which the run went on with.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from meshwright_checkpoint.errors import CheckpointError

NAME = ".elastic.json"
MAX_BYTES = 1 << 12


def begin(folder: str | os.PathLike[str]) -> tuple[str, int]:
    """Count a start of the run, on one rank: its name (32 hex digits), and the number of this start.

    folder: a path, or a URL of fsspec. Raises CheckpointError: the record is damaged, or cannot be written.
    """
    where = f"{os.fspath(folder).rstrip('/')}/{NAME}"
    try:
        data = _read(where)
        run, starts = (uuid.uuid4().hex, 0) if data is None else _checked(data, where)
        _write(where, json.dumps({"run": run, "starts": starts + 1}).encode())
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read and written: {error}") from error
    return run, starts + 1


def _checked(data: bytes, where: str) -> tuple[str, int]:
    try:
        value: Any = json.loads(data)
        run, starts = value["run"], value["starts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        run = starts = None
    if (
        not isinstance(run, str)
        or not re.fullmatch("[0-9a-f]{32}", run)
        or type(starts) is not int
        or starts < 0
    ):
        raise CheckpointError(
            f"{where} is damaged: it has to hold the name of the run and the number of its starts; remove it, and the run goes "
            "on from its last checkpoint"
        )
    return run, starts


def _read(where: str) -> bytes | None:
    """The file, None if there is none."""
    try:
        with _open(where, "rb") as file:
            data: bytes = file.read(MAX_BYTES)
            return data
    except FileNotFoundError:
        return None


def _write(where: str, data: bytes) -> None:
    if "://" in where:
        with _open(where, "wb") as file:
            file.write(data)
        return
    path = Path(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(data)
    # a reader sees the old record or the new one
    os.replace(new, path)


def _open(where: str, mode: str) -> Any:
    if "://" in where:
        import fsspec

        return fsspec.open(where, mode).open()
    return Path(where).open(mode)
