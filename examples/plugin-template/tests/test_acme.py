"""The tests of this distribution: the conformance suite of meshwright. Tests of what is special about yours go here too."""

from __future__ import annotations

import subprocess
import sys


def test_conformance() -> None:
    suite = "meshwright_dtensor.testing.conformance"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--pyargs", suite, "--plugin", "acme-meshwright"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
