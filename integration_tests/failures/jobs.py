"""Jobs in which a rank fails: how long after the failure they end, and what is on the screen."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import meshwright as mw

from .failing_script import PLANS, RANK, TIMEOUT, batch, build

SCRIPT = Path(__file__).with_name("failing_script.py")
ENDS_WITHIN = 15.0
"""Seconds from the moment when the others can know of the failure."""
LONGEST = 150.0
"""Seconds after which a job is ended from here."""
LINES = 30
"""Of the report on the screen."""
CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "forward": "this is the failure in the forward",
        "backward": "this is the failure in the backward",
        "hook": "this is the failure in the hook",
        "data loader": "this is the failure in the data loader",
        "checkpoint thread": "this is the failure in the checkpoint thread",
        "optimizer": "this is the failure in the optimizer",
        "SIGKILL": "SIGKILL",
        "SIGSTOP": "does not answer",
        "SIGTERM": "SIGTERM",
        "out of memory": "allocate",
        "full disk": "File too large",
        "fewer collectives": r"wait for each other|all_reduce",
        "early return": "ended",
    }
)
"""Failure -> words of its report."""
WAITS = frozenset({"SIGSTOP", "fewer collectives"})
"""Failures that the others find by waiting."""


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        seconds: from the failure to the end of the last process.
        code: of the launcher.
        screen: lines of the report, from its first to the last on the screen.
        faults: what is not as it should be.
    """

    plan: str
    kind: str
    seconds: float
    code: int
    screen: tuple[str, ...]
    faults: tuple[str, ...]


def write_plans(folder: Path, names: Iterable[str] = PLANS) -> dict[str, Path]:
    """Files of the plans with these names."""
    files = {}
    for name in names:
        pins = PLANS[name]
        files[name] = folder / f"{name}.json"
        plan = mw.plan(build(), batch(0), world_size=4, cluster="laptop-cpu", **pins)
        files[name].write_text(plan.to_json())  # type: ignore[union-attr]
    return files


def run_job(plan: str, file: Path, kind: str) -> Ended:
    """Start a job, and wait until it has ended."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        command += [str(SCRIPT), str(file), kind, str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as job:
            try:
                text, code = job.communicate(timeout=LONGEST)[1], job.returncode
            except subprocess.TimeoutExpired:
                # its ranks have sessions of their own, and hold the pipe
                subprocess.run(["pkill", "-9", "-f", str(folder)], check=False)
                os.killpg(job.pid, signal.SIGKILL)
                text, code = job.communicate()[1], -1
        end, failed = time.time(), folder / "failed"
        seconds = end - failed.stat().st_mtime if failed.exists() else float("inf")
    screen = tuple(text.rstrip().splitlines())
    return Ended(plan, kind, seconds, code, screen, tuple(_faults(kind, seconds, code, screen)))


def _faults(kind: str, seconds: float, code: int, screen: tuple[str, ...]) -> list[str]:
    last = "\n".join(screen[-LINES:])
    limit = ENDS_WITHIN + (TIMEOUT if kind in WAITS else 0)
    faults = [] if code else ["exit code 0"]
    if seconds > limit:
        faults.append(f"ended after {seconds:.0f} s, {limit:.0f} s are allowed")
    if not re.search(rf"\b[Rr]ank\W*{RANK}\b", last):
        faults.append(f"rank {RANK} is not named")
    if not re.search(CAUSES.get(kind, kind), last):
        faults.append("the cause is not named")
    return faults
