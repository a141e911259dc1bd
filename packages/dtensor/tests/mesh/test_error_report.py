"""The report of a rank's exception: the place, the user's lines, the cause last, and no more than the screen takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_dtensor.errors import StageError
from meshwright_dtensor.mesh import error_report
from meshwright_dtensor.mesh.error_report import MAX_FRAMES, place_of, short_traceback


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a mistake")


def raised(function: Any, *args: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


def test_the_innermost_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Broken()))
    error = raised(model, torch.ones(1, 2))
    assert place_of(error, error.__traceback__)["module"] == "1.1"
    lines = short_traceback(error, error.__traceback__)
    assert lines[-1] == "ValueError: a mistake" and lines[-2].strip() == 'raise ValueError("a mistake")'
    # torch's own calls are not in it
    assert not any("module.py" in line for line in lines)
    assert "module" not in place_of(ValueError("elsewhere"), None)


def deep(count: int) -> None:
    if not count:
        raise ValueError("\n".join(map(str, range(50))))
    deep(count - 1)


def test_a_deep_call_and_a_long_text_are_cut() -> None:
    error = raised(deep, 100)
    lines = short_traceback(error, error.__traceback__)
    assert len(lines) <= 2 * MAX_FRAMES + 6
    assert "in raised" in lines[1] and lines[-5:] == ["ValueError: 0", "1", "2", "3", "4"]


def test_the_stage_of_a_pipeline_is_named_with_the_first_cause() -> None:
    def fails() -> None:
        try:
            Broken()(torch.ones(1))
        except ValueError as cause:
            raise StageError(1, 3, "backward", 2, "ValueError: a mistake") from cause

    error = raised(fails)
    place = place_of(error, error.__traceback__)
    assert (place["stage"], place["microbatch"], place["action"]) == (1, 3, "backward")
    lines = short_traceback(error, error.__traceback__)
    assert any("raise ValueError" in line for line in lines) and lines[-1].startswith("StageError: stage 1")


GLOO = "[transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:36500"


def with_cause(cause: Exception) -> Exception:
    error = ValueError("a step failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (RuntimeError(GLOO), True),
        (with_cause(RuntimeError(GLOO)), True),
        (StageError(1, 0, "forward", 2, f"RuntimeError: {GLOO}"), True),
        # a loader that reads over a connection of its own
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (with_cause(BrokenPipeError(32, "Broken pipe")), False),
        (ValueError("Broken pipe"), False),
        (RuntimeError("a mistake"), False),
    ],
)
def test_only_an_error_of_a_collective_tells_that_another_rank_has_left(error: Exception, left: bool) -> None:
    assert error_report._is_of_link(error, error_report.LEFT_ALONE) == left


def test_torchrun_finds_a_whole_report_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    write = Path.write_text

    def full(path: Path, text: str) -> int:
        write(path, text[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert not error_report._record(ValueError("a mistake"), None, [])
    assert not list(tmp_path.iterdir())
    error_report.tell_error(raised(deep, 0))
    assert list(tmp_path.iterdir()) == [file]
    message = json.loads(file.read_text())["message"]
    assert (
        message["message"].startswith("ValueError: 0")
        and "test_error_report.py" in message["extraInfo"]["py_callstack"]
    )
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not error_report._record(ValueError("a mistake"), None, [])


SCRIPT = """
import torch.distributed as dist
from meshwright_dtensor.mesh.mesh import init
init("cpu")
if dist.get_rank() == 1:
    LAST
dist.barrier()
"""


def screen_of(tmp_path: Path, last: str, *options: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("LAST", last))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        # so that both ranks have ended when torchrun looks
        "--monitor-interval=5",
        "--nproc-per-node=2",
        *options,
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    return [line.strip() for line in done.stderr.splitlines() if line.strip(" =")]


@pytest.mark.slow
def test_the_first_error_of_all_ranks_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    lines = screen_of(tmp_path, 'raise ValueError("a mistake of the user")')
    assert lines[-1] == "ValueError: a mistake of the user" and lines[-2].startswith("raise ValueError")
    assert "rank      : 1 (local_rank: 1)" in lines[-9:]
    assert "[rank1]: ValueError: a mistake of the user" in lines


@pytest.mark.slow
def test_an_error_of_a_connection_of_the_user_is_the_cause_also_after_restarts(tmp_path: Path) -> None:
    error = "ConnectionResetError: [Errno 104] Connection reset by peer"
    lines = screen_of(
        tmp_path, 'raise ConnectionResetError(104, "Connection reset by peer")', "--max-restarts=1"
    )
    assert lines[-1] == error and "rank      : 1 (local_rank: 1)" in lines[-9:]
    # after the first start, which torchrun does not report, and after the last one
    assert lines.count(f"[rank1]: {error}") == 2


@pytest.mark.slow
def test_with_restarts_each_round_has_its_report_and_the_last_is_the_last_thing_on_the_screen(
    tmp_path: Path,
) -> None:
    lines = screen_of(tmp_path, 'raise ValueError("a mistake of the user")', "--max-restarts=1")
    assert lines[-1] == "ValueError: a mistake of the user"
    assert lines.count("[rank1]: ValueError: a mistake of the user") == 2
    assert sum(line.startswith("[rank1]: rank 1 of 2 on ") for line in lines) == 2
    # torchrun's own
    assert sum("Traceback" in line for line in lines) == 1


@pytest.mark.slow
def test_a_rank_that_returns_early_is_named(tmp_path: Path) -> None:
    lines = screen_of(tmp_path, "raise SystemExit(0)")
    assert lines[-1] == "rank 1 has ended: its script has come to its end"


ENDS = """
import atexit, os, threading
atexit.register(lambda: os._exit(3 if any("meshwright" in t.name for t in threading.enumerate()) else 0))
from meshwright_dtensor.mesh.mesh import init
init("cpu")
assert any("meshwright" in t.name for t in threading.enumerate())
"""


@pytest.mark.slow
def test_no_thread_of_ours_is_left_when_the_interpreter_ends(tmp_path: Path) -> None:
    """One that comes back from C++ then aborts the process."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
