"""The line that ends a run of all tests adds up what every pytest said."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOTAL = str(Path(__file__).parent.parent / "tools" / "total.py")
LOG = """
unit-dtensor: commands[0]> pytest packages/dtensor/tests
======================= 1145 passed in 277.98s (0:04:37) =======================
some text === 3 failed in it ===
\x1b[31m=================== 1 failed, 55 passed, 2 skipped in 26.07s ===================\x1b[0m
"""


@pytest.mark.parametrize(
    ("log", "code", "summary"),
    [
        (LOG, 1, "1 failed, 1200 passed, 2 skipped in 9.00s"),
        ("=== 5 passed, 1 error in 1.00s ===", 1, "5 passed, 1 errors in 9.00s"),
        ("== 2 passed in 1.00s ==\n== 3 passed in 0.10s ==", 0, "5 passed in 9.00s"),
        ("nothing", 1, "no tests ran in 9.00s"),
    ],
)
def test_total(log: str, code: int, summary: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert runpy.run_path(TOTAL)["main"](str(path), "9") == code
    line = capsys.readouterr().out.strip()
    assert line.strip("= ") == summary and line.startswith("=") and line.endswith("=")
