"""Which rank this is, starting ranks, and failing once for all of them."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from meshwright import ranks
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.rank_pool import RankPool


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")


def test_outside_a_job() -> None:
    assert not ranks.is_rank()
    assert (ranks.rank(), ranks.world_size()) == (0, 1)
    assert ranks.check_world_size(None, default=4) == 4
    assert ranks.check_world_size(2, default=4) == 2


@pytest.mark.usefixtures("job")
def test_inside_a_job() -> None:
    assert ranks.is_rank()
    assert (ranks.rank(), ranks.world_size()) == (1, 3)
    assert ranks.check_world_size(None, default=4) == 3
    with pytest.raises(UsageError, match="--world-size 2 does not match this job of 3 ranks"):
        ranks.check_world_size(2)


@pytest.mark.parametrize("size", [0, -1, 65])
def test_world_sizes_out_of_range(size: int) -> None:
    with pytest.raises(UsageError, match=f"--world-size {size} is outside"):
        ranks.check_world_size(size)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_the_code_of_the_job(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    given: list[str] = []

    def run(options: argparse.Namespace) -> None:
        given.append(options.shutdown_timeout)
        raise SignalException("told", number)

    monkeypatch.setattr("torch.distributed.run.run", run)
    assert ranks.launch(2, ["train"], grace=77) == 128 + number
    assert given == [77]


# What is left at the end of the module is deleted when the interpreter shuts down.
LEAVING = """
import atexit, os, sys
class Left:
    def __del__(self):
        os._exit(9)
left = Left()
atexit.register(print, "registered")
print("printed", end=" ")
"""


@pytest.mark.parametrize(
    "how",
    ["from meshwright import ranks; ranks.leave(0)", "from meshwright.cli import main; main(['plugins'])"],
)
def test_a_rank_leaves_without_taking_the_interpreter_down(how: str) -> None:
    for job, code in (({"RANK": "0", "WORLD_SIZE": "1"}, 0), ({}, 9)):
        done = subprocess.run(
            [sys.executable, "-c", LEAVING + how], env={**os.environ, **job}, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert done.stdout.startswith("printed ") and done.stdout.endswith("registered\n")


def test_torchrun_is_given_the_error_of_a_command(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    job = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_ERROR_FILE": str(file)}
    command = [sys.executable, "-m", "meshwright", "train", "none.toml"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **job}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Error: none.toml cannot be read")
    message = json.loads(file.read_text())["message"]
    assert message["message"].startswith("RecipeError: none.toml cannot be read")
    assert message["extraInfo"]["py_callstack"].startswith("rank 0 of 1 on ")


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


def on_first(rank: int, size: int, error: Exception | None) -> str:
    def work() -> str:
        if error is None:
            return f"of {rank}"
        raise Unpicklable("no such file") if isinstance(error, ValueError) else error

    try:
        return ranks.first_rank_first(work)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, ["of 0", "of 1"]),
        (UsageError("no such file"), ["UsageError: no such file"] * 2),
        (ValueError(), ["RuntimeError: Unpicklable: no such file"] * 2),
    ],
)
def test_an_error_of_the_first_rank_is_one_of_all(
    rank_pool: RankPool, error: Exception | None, told: list[str]
) -> None:
    assert rank_pool.run(2, on_first, error) == told


def put_blocked(given: Any) -> None:
    given.put(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


@pytest.mark.parametrize(("waits", "blocked"), [(True, {signal.SIGINT, signal.SIGTERM}), (False, set())])
def test_signals_are_blocked_only_where_they_can_be_waited_for(
    monkeypatch: pytest.MonkeyPatch, waits: bool, blocked: set[signal.Signals]
) -> None:
    if not waits:
        # as on macOS
        monkeypatch.delattr(signal, "sigwaitinfo")
    context = multiprocessing.get_context("fork")
    given = context.SimpleQueue()
    with ranks.signals():
        worker = context.Process(target=put_blocked, args=(given,))
        worker.start()
        assert given.get() == blocked
        worker.join(30)


def wait_for_ever(ready: Any, ignores: bool) -> None:
    # as the worker of a loader does
    torch.utils.data._utils.signal_handling._set_worker_signal_handlers()
    if ignores:
        ranks.ignore_signals(0)
    ready.set()
    time.sleep(1000)


@pytest.mark.parametrize(("inside", "ignores"), [(True, False), (True, True), (False, False)])
def test_a_forked_process_ends_at_signals_of_its_rank_alone(inside: bool, ignores: bool) -> None:
    with ranks.signals() if inside else nullcontext():
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        worker = context.Process(target=wait_for_ever, args=(ready, ignores), daemon=True)
        worker.start()
        assert ready.wait(30)
        for name in ("INT", "TERM"):
            subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
        worker.join(0.5 if inside else 30)
        assert worker.is_alive() == inside
        worker.terminate()
        worker.join(30)
        assert not worker.is_alive()


# A stand-in for `meshwright`: starts itself on two ranks, which then fail as told.
SCRIPT = """
import os, sys, time
from meshwright import ranks
if ranks.is_rank():
    rank, what = ranks.rank(), sys.argv[1]
    if what == "both":
        ranks.fail("all of us", 3)
    if what == "second" and rank == 1:
        ranks.fail("only me", 4)
    if what == "second":
        time.sleep(60)
else:
    sys.exit(ranks.launch(2, sys.argv[1:], module="job"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "line"),
    [("both", 3, "all of us"), ("second", 4, "rank 1: only me"), ("neither", 0, None)],
)
def test_the_exit_code_of_the_first_failure_and_one_line(
    tmp_path: Path, what: str, code: int, line: str | None
) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "job.py", what],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    errors = [text for text in done.stderr.splitlines() if text.startswith("Error: ")]
    assert len(errors) == (line is not None)
    if line is not None:
        assert line in errors[0]
    assert "Traceback" not in done.stderr
