"""Coverage-guided fuzzing of all parsers of stored data, for a minute in all, in separate processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 30


@pytest.mark.slow
def test_fuzzing_raises_package_errors_in_bounded_memory(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed; tox installs it where it has a wheel")
    script = Path(__file__).parent / "fuzzing.py"
    # at the same time, so that the machine's other cores do not wait for it
    running = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        options = [f"-max_total_time={SECONDS}", f"-seed={seed}", f"-artifact_prefix={folder}/"]
        command = [sys.executable, str(script), *options]
        running.append(
            subprocess.Popen(
                command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    for process in running:
        _, errors = process.communicate(timeout=6 * SECONDS)
        assert process.returncode == 0, errors[-3000:]
        assert "Done " in errors, errors[-3000:]  # libFuzzer prints the number of runs
