"""Run the command line as a user does: in a process of its own, on two or more ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(
    arguments: list[str], *, launcher: bool, timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """`meshwright ARGUMENTS`, under torchrun with two ranks, or launching its ranks by itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if launcher else []
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "meshwright", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
    )
