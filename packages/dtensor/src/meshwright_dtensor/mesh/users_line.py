"""The line of the user's code that a thread runs: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of this framework."""
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    # torch.autograd.Function.apply runs code of ours under the name of torch
    return name.startswith("meshwright") or frame.f_code.co_filename.startswith(_PACKAGE)


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither torch's nor ours."""
    return not (is_ours(frame) or frame.f_code.co_filename.startswith((_TORCH, "<")))


def is_pythons(frame: FrameType) -> bool:
    """Whether a frame runs code of the library of Python itself."""
    file = frame.f_code.co_filename
    return file.startswith(_PYTHON) and "-packages" not in file


def users_line(frame: FrameType | None) -> tuple[str, str]:
    """The innermost such line: file, number and function, and its text; empty texts where there is none."""
    for f in outwards(frame):
        if is_users(f):
            file = f.f_code.co_filename
            where = f"{Path(file).name}:{f.f_lineno}, in {f.f_code.co_name}"
            return where, linecache.getline(file, f.f_lineno).strip()
    return "", ""
