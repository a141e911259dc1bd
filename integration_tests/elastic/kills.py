"""Kills ranks of a run, or all of it with its launcher, at random moments, until it has come to its end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright_checkpoint import latest

from .run_script import STEPS

SCRIPT = Path(__file__).with_name("run_script.py")
SECONDS = 300
"""A run that takes longer without a kill hangs."""


@contextmanager
def launched(folder: Path, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with these ranks, which it starts again when one of them dies. Ended with all ranks in the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=10000", "--monitor-interval=0.1", str(SCRIPT), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "output").open("ab") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            yield job
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def lines(folder: Path) -> list[dict[str, Any]]:
    """What the run has told; a line that is being written is left out."""
    log = folder / "log"
    told = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in told if line.endswith("\n")]


def torture(folder: Path, kills: int, seed: int, longest: float = 4.0) -> int:
    """Kill a run so often, each time after it has begun to load or train. The number of kills until it had ended.

    longest: seconds from its beginning to a kill.

    Raises AssertionError: the run does not go on by itself, or a committed step was lost.
    """
    choose, done = random.Random(seed), 0
    while True:
        ranks = choose.choice([1, 2, 2, 2, 3])
        with launched(folder, ranks) as job:
            while _wait_for_start(folder, job, None if done >= kills else choose.uniform(0, longest)):
                committed = _committed(folder)
                # the whole machine, or one rank, which torchrun starts again
                whole = choose.random() < 0.2
                _kill(folder, job, None if whole else choose.randrange(ranks))
                done += 1
                if whole:
                    break
                _check_kept(folder, committed)
            else:
                return done
        _check_kept(folder, committed)


def _wait_for_start(folder: Path, job: subprocess.Popen[bytes], more: float | None) -> bool:
    """Wait until the ranks have begun, and `more` seconds (None: to the end). Whether the run goes on."""
    begun, end = len(list(folder.glob("pid-*"))), time.monotonic() + SECONDS
    while time.monotonic() < end:
        if job.poll() is not None:
            assert job.returncode == 0 and lines(folder)[-1] == {"done": True}, (
                folder / "output"
            ).read_text()[-3000:]
            return False
        begun = begun or len(list(folder.glob("pid-*")))
        if begun and more is not None:
            time.sleep(more)
            return job.poll() is None
        time.sleep(0.05)
    raise AssertionError(f"the run hangs: {(folder / 'output').read_text()[-3000:]}")


def _kill(folder: Path, job: subprocess.Popen[bytes], rank: int | None) -> None:
    """SIGKILL to a rank; to the launcher and all ranks, where it is None or that rank has not begun."""
    pids = {path.name: int(path.read_text() or 0) for path in folder.glob("pid-*")}
    for name in pids:
        (folder / name).unlink()
    only = pids.get(f"pid-{rank}", 0)
    if not only:
        os.kill(job.pid, signal.SIGKILL)
    for pid in [only] if only else filter(None, pids.values()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _committed(folder: Path) -> int:
    path = latest(folder / "run") if (folder / "run").exists() else None
    return int(path.rpartition("-")[2]) if path else 0


def _check_kept(folder: Path, committed: int) -> None:
    assert _committed(folder) >= committed, (
        f"step {committed} was committed, and {_committed(folder)} is the last"
    )
    starts = [line["first"] for line in lines(folder) if "first" in line]
    assert starts == sorted(starts), f"starts go back: {starts}"


def losses(folder: Path) -> list[float]:
    """The loss of every step, of the last time that it was done."""
    told = {line["step"]: line["loss"] for line in lines(folder) if "step" in line}
    assert sorted(told) == list(range(STEPS))
    return [told[step] for step in range(STEPS)]


def spread(folder: Path) -> float:
    """The largest relative distance between two losses of a step that was done several times."""
    seen: dict[int, list[float]] = {}
    for line in lines(folder):
        if "step" in line:
            seen.setdefault(line["step"], []).append(line["loss"])
    return max((max(values) - min(values)) / max(values) for values in seen.values())
