"""`tox run -e gpu` where there is no GPU: what can run does, and a line says how many checks wait for one."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
CHECKS = ("test_gpu_alone.py", "test_gpu_random.py")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    folder = "integration_tests/gpu"
    files = [f"{folder}/{file}" for file in CHECKS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu or not gpu", *files]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_without_a_gpu_it_says_how_many_checks_wait() -> None:
    # those that train on ranks run in tests of this folder
    done = run("-k", "not (world_of_one or kernels_of_attention or compiled_regions)")
    assert done.returncode == 0, done.stdout + done.stderr
    line = re.search(
        r"no GPU here: (\d+) checks wait for one, the others ran on the CPU; .*tox run -e gpu", done.stdout
    )
    skipped = re.search(r"(\d+) skipped", done.stdout)
    assert line and skipped
    assert int(line[1]) == int(skipped[1]) > 50
    assert "failed" not in done.stdout


def test_a_gpu_that_is_not_there_is_refused() -> None:
    done = run("--device", "cuda")
    assert done.returncode == 4
    assert "--device: device 'cuda': there is none here; use one of those here, cpu" in done.stderr


def test_the_benchmark_says_that_it_waits() -> None:
    script = ROOT / "benchmarks" / "gpu_step.py"
    done = subprocess.run(
        [sys.executable, str(script), "--only-on-gpu"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("no GPU here: 2 verdicts wait for one")


def test_its_verdicts() -> None:
    verdicts = runpy.run_path(str(ROOT / "benchmarks" / "gpu_step.py"))["verdicts"]
    assert [line.split(":")[1].strip() for line in verdicts(1.02, -0.05)] == ["met", "met"]
    assert [line.split(":")[1].strip() for line in verdicts(1.021, 0.051)] == ["MISSED", "MISSED"]
