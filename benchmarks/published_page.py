"""The figures of docs/planner-published.md, made of the results of planner_published.py.

The page has places for them, `<!-- made: NAME -->` to `<!-- end -->`. A test renders the stored results again and compares.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planner-published.md"
RESULTS = ROOT / "benchmarks" / "results" / "planner-published.json"
ERROR, ORDER = 0.1, 0.9
"""Goals of each table: the mean absolute error at most, and the rank correlation at least."""

NAMES = {
    "torchtitan": "Llama-3 8B, H100 96 GB",
    "qwen": "Qwen3-32B, H100 96 GB",
    "tensor": "Llama-3.1 with TP 8, H100 96 GB",
    "a100": "Llama 2 and 3, A100",
    "megatron": "GPT 1.7B to 1,008B, A100",
    "meta": "Llama-3 405B, H100",
}


def judged(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, int]:
    """Mean absolute error, rank correlation, and in how many rows memory is right."""
    ran = [row for row in rows if row["published"] is not None]
    mean = statistics.mean(abs(row["error"]) for row in ran)
    order = spearmanr([row["published"] for row in ran], [row["predicted"] for row in ran]).statistic
    return mean, float(order), sum(row["fits"] == (row["published"] is not None) for row in rows)


def _bold(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


def _summary(results: Mapping[str, Any]) -> str:
    lines = ["| table | rows | mean absolute error | rank correlation | memory |", "|---|---|---|---|---|"]
    for key, name in NAMES.items():
        rows = results[key]
        mean, order, right = judged(rows)
        cells = (
            _bold(f"{100 * mean:.1f}%", mean > ERROR),
            _bold(f"{order:.2f}", order < ORDER),
            _bold(f"{right} of {len(rows)}", right < len(rows)),
        )
        lines.append(f"| {name} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| | published | predicted | | memory, GiB (published) |", "|---|---|---|---|---|"]
    for row in rows:
        ran = row["published"] is not None
        published = f"{row['published']:,g}" if ran else "out of memory"
        figures = f"{row['predicted']:,.4g}" if row["predicted"] < 1000 else f"{row['predicted']:,.0f}"
        error = f"{100 * row['error']:+.1f}%" if ran else ""
        held = f"{row['predicted GiB']:.1f}"
        held += "" if row["published GiB"] is None else f" ({row['published GiB']:g})"
        memory = _bold(held, row["fits"] != ran)
        lines.append(f"| {row['row']} | {published} | {figures if ran else ''} | {error} | {memory} |")
    return "\n".join(lines)


def _alpa(plans: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| model | GPUs | Alpa's plan, predicted | the planner's | predicted |", "|---|---|---|---|---|"]
    for row in plans:
        lines.append(
            f"| {row['billions']}B | {row['gpus']} | {row['alpa']:.1f} s | {row['pick']} | {row['ours']:.1f} s |"
        )
    return "\n".join(lines)


def with_figures(page: str, results: Mapping[str, Any]) -> str:
    """The page with the figures of these results."""
    made = {key: _rows(results[key]) for key in NAMES}
    made |= {"summary": _summary(results), "alpa": _alpa(results["alpa"])}
    places = re.compile(r"(<!-- made: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return places.sub(lambda m: m[1] + made[m[2]] + m[3], page)


def write(results: Mapping[str, Any]) -> None:
    """Store the results of some or all tables, and write the figures of all into the page."""
    kept = ("row", "published", "predicted", "error", "published GiB", "predicted GiB", "fits")
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for key, rows in results.items():
        stored[key] = rows if key == "alpa" else [{name: row[name] for name in kept} for row in rows]
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    PAGE.write_text(with_figures(PAGE.read_text(), stored))
