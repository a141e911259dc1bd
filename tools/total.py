"""Add up pytest's summary lines: `python tools/total.py LOG SECONDS` prints one such line for all runs.

Exits 1 when a run failed, or when the log holds no run at all.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

SUMMARY = re.compile(r"^=+ (?P<counts>.*\b\d+ \w+.*) in [\d.]+s(?: \([\d:]+\))? =+$")
ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors")


def total(text: str) -> Counter[str]:
    """What pytest counted, over all runs whose summary line is in `text`."""
    counts: Counter[str] = Counter()
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        if match := SUMMARY.match(line.strip()):
            for number, word in re.findall(r"(\d+) (\w+)", match["counts"]):
                counts[{"error": "errors", "warning": "warnings"}.get(word, word)] += int(number)
    return counts


def main(path: str, seconds: str) -> int:
    with open(path, encoding="utf-8", errors="replace") as file:
        counts = total(file.read())
    parts = ", ".join(f"{counts[word]} {word}" for word in ORDER if counts[word]) or "no tests ran"
    print(f" {parts} in {float(seconds):.2f}s ".center(80, "="))
    return 1 if counts["failed"] or counts["errors"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
