"""The example is one file for one device and for many, and trains alike on both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def losses(*launcher: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *launcher, "examples/train_gpt2.py", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"step +\d+  loss (\S+)", done.stdout)


@pytest.mark.slow
def test_the_example_is_the_same_on_one_device_and_on_two() -> None:
    single = losses()
    two = losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert len(single) == len(two) == 20
    assert float(single[-1]) < float(single[0]) - 1.0
    # printed with four digits: the last may fall on either side
    assert all(abs(float(a) - float(b)) < 1.5e-4 for a, b in zip(single, two, strict=True))
