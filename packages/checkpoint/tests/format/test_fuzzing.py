"""Coverage-guided fuzzing of all parsers of stored data, for a minute, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 60


@pytest.mark.slow
def test_fuzzing_raises_package_errors_in_bounded_memory(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed; tox installs it where it has a wheel")
    script = Path(__file__).parent / "fuzzing.py"
    command = [sys.executable, str(script), f"-max_total_time={SECONDS}", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done " in done.stderr, done.stderr[-3000:]  # libFuzzer prints the number of runs
