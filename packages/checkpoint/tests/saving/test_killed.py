"""A save that is killed at any moment: earlier checkpoints are intact, and `latest` finds a complete one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshwright_checkpoint import CheckpointError, latest, load, save
from meshwright_checkpoint.storage.filesystem import FileLock

KILLS = 10
SCRIPT = Path(__file__).parents[1] / "saving_forever.py"


def model_of(step: int) -> torch.nn.Module:
    return torch.nn.ParameterDict(
        {"w": torch.full((1 << 20,), float(step)), "v": torch.full((3,), float(step))}
    )


@pytest.mark.slow
def test_committed_checkpoints_survive_kills(tmp_path: Path) -> None:
    rng = random.Random(7)
    save(tmp_path / "step-0", model=model_of(0), asynchronous=False)
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    committed = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for _ in range(KILLS):
            kill_one(server, rng.random() * 0.08)
            committed = check(tmp_path, committed)
    # leftovers of the last kill are removed by the next save
    save(tmp_path / f"step-{committed + 1}", model=model_of(committed + 1), asynchronous=False)
    assert latest(tmp_path) == str(tmp_path / f"step-{committed + 1}")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def kill_one(server: subprocess.Popen[str], after: float) -> None:
    """Let a process save, and kill it `after` seconds."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    assert server.stdout.readline() == "over\n"


def check(folder: Path, committed: int) -> int:
    """Load the latest checkpoint and the first one. The latest step is at least `committed`."""
    path_of_latest = latest(folder)
    assert path_of_latest is not None
    step = int(Path(path_of_latest).name.removeprefix("step-"))
    assert step >= committed
    model = model_of(-1)
    for path, value in ((path_of_latest, step), (folder / "step-0", 0)):
        load(path, model=model)
        assert all((p == value).all() for p in model.parameters())
    return step


@pytest.mark.slow
def test_save_rejects_second_job(tmp_path: Path) -> None:
    code = f"""
import sys
from meshwright_checkpoint.storage.filesystem import FileLock
from pathlib import Path
lock = FileLock(Path({str(tmp_path)!r}) / ".x.lock")
assert lock.take()
lock.write('{{"host": "other", "pid": 7}}')
print("held", flush=True)
sys.stdin.readline()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None and other.stdout.readline()
    with pytest.raises(CheckpointError, match=r"another job is saving to .*process 7 on other"):
        save(tmp_path / "x", model=model_of(1))
    other.communicate(b"\n")  # the process ends without a release
    save(tmp_path / "x", model=model_of(1), asynchronous=False)
    lock = FileLock(tmp_path / ".y.lock")
    assert lock.take()
    lock.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]
