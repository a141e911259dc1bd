"""The report of the exception that ends a rank: torchrun shows that of the first rank, once, as the last thing on the screen.

It has the rank, its host, the module, stage and microbatch, the lines of the user's own code, and last the cause. The same is in
the JSON that torchrun writes where TORCHELASTIC_ERROR_FILE says.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright_dtensor._torch.core import MODULE_CALL
from meshwright_dtensor.errors import MeshwrightError, StageError
from meshwright_dtensor.mesh.bounded_store import SilentStoreError
from meshwright_dtensor.mesh.lost_ranks import LostRanks, in_words, kill_here
from meshwright_dtensor.mesh.users_line import is_users

RANK_ENDED, RANK_LATE = (
    "another rank has ended",
    "another rank makes no call in the time limit of the process group",
)
"""What `call_order` says on the ranks that another one has left, and on those that have waited for it."""
LEFT_ALONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    RANK_ENDED,
)
"""What gloo and `call_order` say on the ranks that another one has left."""
WAITED = (
    "Timed out waiting",
    "wait timeout",
    "Watchdog caught collective operation timeout",
    RANK_LATE,
)
"""What gloo, NCCL and `call_order` say on the ranks that have waited for another one."""
MAX_FRAMES = 7
"""Places in the code that a report names; the report of torchrun with them has at most 30 lines."""
MAX_LINE, MAX_TEXT = 300, 5
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


@cache
def report_to_torchrun() -> None:
    """Give torchrun the exception that ends this rank, and the other ranks a note that it ends."""
    lost = LostRanks.of_job()
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        left, waited = (_is_of_link(error, kinds) for kinds in (LEFT_ALONE, WAITED))
        causes, silent = _lost_ranks(lost, trace) if waited or left else ([], [])
        is_victim = left or bool(causes)
        lost.say_ended("" if is_victim else _note(error))
        first, _ = _first(error, trace)
        if isinstance(first, MeshwrightError) and first.rank not in (None, lost.rank):
            # the report of the rank that has failed is to be the first, and torchrun counts whole seconds
            time.sleep(1.0)
        text = _record(error, trace, causes) if isinstance(error, Exception) else ""
        if not text:
            before(kind, error, trace)
            _say("\n".join(causes))
            for process in silent:
                kill_here(process)
            return
        if silent:
            time.sleep(1.0)
        # torchrun shows a report after the last restart only, so with restarts each rank shows its own
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        _say("\n".join([_note(error), *causes]) if is_victim or not restarts else text)
        for process in silent:
            # not before: torchrun would show its end as the first, in the same second or in one before
            kill_here(process)

    sys.excepthook = report
    atexit.register(lost.say_ended, "its script has come to its end")


def _is_of_link(error: BaseException, words: Sequence[str]) -> bool:
    """Whether the first cause of an error is one of gloo or NCCL with such words.

    Theirs are RuntimeErrors, which errors of ours repeat for other ranks. Others with the same words, such as a
    ConnectionResetError, are of a connection of the user's own: this rank is the cause, and not left alone.
    """
    first, _ = _first(error, None)
    return isinstance(first, (RuntimeError, MeshwrightError)) and any(text in str(first) for text in words)


def _say(text: str) -> None:
    rank = os.environ.get("RANK", "?")
    # in one piece, since other ranks write there too
    sys.stderr.write("".join(f"[rank{rank}]: {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def record_error(error: Exception) -> None:
    """Give torchrun an exception that this process does not raise, to show it in the end."""
    _record(error, error.__traceback__, [])


def tell_error(error: Exception) -> None:
    """Give torchrun and the other ranks an exception for which this process ends, and which the caller prints."""
    record_error(error)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        LostRanks.of_job().say_ended("" if _is_of_link(error, LEFT_ALONE + WAITED) else _note(error))


def _note(error: BaseException) -> str:
    """What other ranks are told of the exception that ends this one."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:MAX_LINE]


def _lost_ranks(lost: LostRanks, trace: TracebackType | None) -> tuple[list[str], list[tuple[str, int]]]:
    """Because of which ranks this one had to end, in words, and (host, process) of those that do not answer."""
    # the error of the rank that left is to be the first, and torchrun counts whole seconds
    end = time.monotonic() + 1.0
    try:
        here = next((": ".join(_line(*place)) for place in reversed(list(_places(trace, last=False)))), "")
        lost.say_waited(here)
        told = lost.ended()
        silent = {} if told else lost.silent()
        time.sleep(max(0.0, end - time.monotonic()))
        texts = [f"rank {rank} has ended: {how}" for rank, how in told.items()]
        texts += [in_words(rank, process) for rank, process in silent.items()]
        elsewhere = [f"rank {r} was in {place}" for r, place in lost.waited().items() if place != here]
        return texts or elsewhere[:4], list(silent.values())
    except SilentStoreError as error_of_store:
        return [str(error_of_store)], []
    except RuntimeError:
        # it has ended, and tells nothing
        return [], []


def _record(error: Exception, trace: TracebackType | None, causes: list[str]) -> str:
    """Write the report where torchrun looks for it. Its text, "" where that could not be done."""
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return ""
    place = place_of(error, trace)
    text = "\n".join([_heading(place), *short_traceback(error, trace, len(causes)), *causes])
    details = {"py_callstack": _shown(text), "timestamp": str(int(time.time())), **place}
    data = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(data))
        # torchrun itself fails on half a file: of a full disk, or of a rank that it ends meanwhile
        os.replace(new, file)
    except OSError:
        with suppress(OSError):
            new.unlink()
        return ""
    return text


def place_of(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Where an exception was raised: rank, ranks, host, and where they are known module, stage, microbatch and action."""
    place: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0")),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "host": socket.gethostname(),
    }
    name = _module_name(_first(error, trace)[1])
    if name:
        place["module"] = name
    if isinstance(error, StageError):
        place |= {"stage": error.stage, "microbatch": error.microbatch, "action": error.action}
    return place


def _module_name(trace: TracebackType | None) -> str:
    """Name of the innermost module whose call is in a traceback, in the outermost one."""
    called = [
        frame.f_locals["self"]
        for frame, _ in traceback.walk_tb(trace)
        if frame.f_code is MODULE_CALL and isinstance(frame.f_locals.get("self"), nn.Module)
    ]
    names = {id(module): name for module in called[:1] for name, module in module.named_modules()}
    return next((name for module in reversed(called) if (name := names.get(id(module)))), "")


def _heading(place: dict[str, Any]) -> str:
    parts = [f"rank {place['rank']} of {place['ranks']} on {place['host']}"]
    parts += [f"module {place['module']}"] if "module" in place else []
    if "stage" in place:
        parts += [f"stage {place['stage']}", f"{place['action']} of microbatch {place['microbatch']}"]
    return ", ".join(parts)


def _first(error: BaseException, trace: TracebackType | None) -> tuple[BaseException, TracebackType | None]:
    """The first cause of an exception, and its traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
        trace = error.__traceback__
    return error, trace


def short_traceback(error: BaseException, trace: TracebackType | None, more: int = 0) -> list[str]:
    """The places of the first cause in code that is neither torch's nor ours, and the error.

    more: lines that are to follow.
    """
    lines: list[str] = []
    first, of_first = _first(error, trace)
    places = list(_places(of_first))
    if first is not error:
        # where the user's code was, and where a stage or a thread failed
        places = [*list(_places(trace))[:1], *places]
    most = MAX_FRAMES - (more + 1) // 2
    if len(places) > most:
        lines.append(f"  (of {len(places)} calls the first two and the last {most - 2})")
        places = [*places[:2], *places[2 - most :]]
    for place in places:
        where, line = _line(*place)
        lines += [f"  {where}", f"    {line}"]
    text = f"{type(error).__name__}: {error}".splitlines()
    return [*lines, *[line[:MAX_LINE] for line in text[:MAX_TEXT]]]


def _line(file: str, number: int, function: str) -> tuple[str, str]:
    return f"{Path(file).name}:{number}, in {function}", linecache.getline(file, number).strip()


def _places(trace: TracebackType | None, last: bool = True) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames in the code of users and models; of the last one always, if `last`."""
    frames = list(traceback.walk_tb(trace))
    for place, (frame, number) in enumerate(frames, 1):
        if is_users(frame) or (last and place == len(frames)):
            yield frame.f_code.co_filename, number, frame.f_code.co_name


def _shown(text: str) -> str:
    """The text with its last line in red, on a terminal."""
    if not sys.stderr.isatty():
        return text
    *lines, last = text.splitlines()
    return "\n".join([*lines, f"{_RED}{last}{_PLAIN}"])
