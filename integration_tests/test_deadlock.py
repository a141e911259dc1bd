"""A call of one rank alone that needs all: the job ends with the lines that the ranks wait in, or with that of the one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import time
import torch
import torch.distributed as dist
import meshwright as mw
from meshwright_dtensor.mesh.deadlock import watch_for_deadlocks

dist.init_process_group("gloo")
watch_for_deadlocks(1.5)
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
x = torch.randn(4, 8)
model = mw.auto_parallelize(model, x, cluster="laptop-cpu", AXIS=2)
for step in range(2):
    if rank == 1 and not step:
        time.sleep(5)
    model(x).square().mean().backward()
    print(f"step {step} of rank {rank}", flush=True)
    if rank == 0 and step:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
LAST
"""


def ended(tmp_path: Path, axis: str, last: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("AXIS", axis).replace("LAST", last))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.slow
def test_a_call_of_one_rank_is_reported(tmp_path: Path) -> None:
    last = "model(x).square().sum()"
    result = ended(tmp_path, "pp", last)
    assert result.returncode == 1
    # a rank that sleeps, or computes, does not wait
    assert result.stdout.count("step 1 of rank") == 2
    report = result.stderr
    assert "the ranks wait for each other in different calls" in report
    assert (
        "rank 0: train.py:21, in <module>: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in report
    )
    assert f"rank 1: train.py:22, in <module>: {last}" in report
    # the error of a connection that was closed is no second report
    assert "Connection closed" not in report


@pytest.mark.slow
def test_a_call_that_others_have_ended_without_is_reported(tmp_path: Path) -> None:
    result = ended(tmp_path, "tp", "")
    assert result.returncode == 1
    assert "another rank has ended, and rank 0 train.py:21" in result.stderr
