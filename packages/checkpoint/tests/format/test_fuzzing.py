"""Coverage-guided fuzzing of all parsers of stored data, for a minute in all, in separate processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_fuzzing_raises_package_errors_in_bounded_memory(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed; tox installs it where it has a wheel")
    script = Path(__file__).parent / "fuzzing.py"
    options = [f"-max_total_time={SECONDS}", f"-seed={seed}", f"-artifact_prefix={tmp_path}/"]
    command = [sys.executable, str(script), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done " in done.stderr, done.stderr[-3000:]  # libFuzzer prints the number of runs
