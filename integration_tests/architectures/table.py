"""The results as a page of docs/, and as a table on the terminal."""

from __future__ import annotations

import datetime
import math
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import torch
from rich.table import Table

from .catalogue import MAX_PARAMETERS
from .judge import TOLERANCES, Verdict
from .layouts import LAYOUTS
from .store import Row

TASKS = {
    "causal-lm": "Causal language models",
    "masked-lm": "Masked language models",
    "seq2seq-lm": "Sequence to sequence",
    "image": "Image classification",
}


def page(rows: Sequence[Row], layouts: Sequence[str]) -> str:
    """The whole of docs/architectures.md."""
    ran = [row for row in rows if not row.unbuildable]
    lines = [
        "# Architectures",
        "",
        "Every architecture that transformers registers for causal, masked and sequence-to-sequence language modelling and for",
        "image classification, unmodified, in training mode (dropout and all), planned automatically. Compared with one device:",
        f"the loss, every gradient and every buffer, each to {TOLERANCES[torch.float32]:g} of its own largest value in",
        "float32; initial values bit for bit. Written by `python -m integration_tests.architectures`; tiny configs, made by field",
        "name.",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}; "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "meshwright"))
        + f"; Python {platform.python_version()}, CPU, gloo.",
        "",
        "| layout | passed | of which by float64 | refused | run | last |",
        "|---|---|---|---|---|---|",
        *(_count(ran, layout) for layout in layouts),
        "",
        "*Worst*: the largest difference of any gradient in float32, relative to that gradient's largest value, in the worst",
        "layout.",
        "*Noise*: gradients that are rounding noise on one device too (see [semantics.md](semantics.md)); they must stay as small.",
        "*float64*: some gradient or buffer differs by more in float32, but no further than rounding moves it on one device (what",
        "one rounding of the weights changes, or the distance from float64, at most 16 times), as happens where a small difference",
        "of large numbers is left or a batch norm has few values to go by. The run is repeated in float64 and must agree to",
        f"{TOLERANCES[torch.float64]:g} in all that differed; the number is the largest difference there.",
        "*Sharded*: parameters of which a rank holds only a part at tp2.",
        "*pp2*: two stages under 1f1b with four microbatches, of one row each; *whole batch*: with one, since several are refused",
        "(batch normalisation, statistics over rows, random numbers that have no rows).",
        "*Refused*: by one of our errors, when planning or in `parallelize`.",
        "",
    ]
    for task, title in TASKS.items():
        lines += [f"## {title}", "", _head(layouts)]
        lines += [_line(row, layouts) for row in ran if row.architecture.task == task]
        lines.append("")
    failures = _failures(ran, layouts)
    if failures:
        lines += [
            "## What fails, and why",
            "",
            "| architecture | layout | what | reason |",
            "|---|---|---|---|",
        ]
        for row, layout, verdict in failures:
            lines.append(f"| {row.architecture.name} | {layout} | {verdict.kind} | {_cell(verdict.reason)} |")
        lines.append("")
    lines += [
        "## Not counted",
        "",
        f"No config of at most {MAX_PARAMETERS:,} parameters builds these here, or they do not train on the batch of their task",
        "even on one device.",
        "",
        "| architecture | task | reason |",
        "|---|---|---|",
        *(
            f"| {row.architecture.name} | {row.architecture.task} | {_cell(row.unbuildable)} |"
            for row in rows
            if row.unbuildable
        ),
    ]
    return "\n".join(lines) + "\n"


def terminal(rows: Sequence[Row], layouts: Sequence[str]) -> Table:
    """What did not pass, and the counts."""
    ran = [row for row in rows if not row.unbuildable]
    counts = ", ".join(f"{layout}: {_passed(ran, layout)} of {_run(ran, layout)}" for layout in layouts)
    table = Table(title=f"passed {counts}; not counted: {len(rows) - len(ran)}")
    for column in ("architecture", "layout", "what", "reason"):
        table.add_column(column, overflow="fold")
    for row, layout, verdict in _failures(ran, layouts):
        table.add_row(row.architecture.name, layout, verdict.kind, verdict.reason)
    return table


def tally(rows: Sequence[Row]) -> Counter[str]:
    """Kind of verdict -> how many."""
    return Counter(verdict.kind for row in rows for verdict in row.verdicts.values())


def _failures(rows: Sequence[Row], layouts: Sequence[str]) -> list[tuple[Row, str, Verdict]]:
    pairs = [(row, layout) for row in rows for layout in layouts if layout in row.verdicts]
    return [(row, layout, row.verdicts[layout]) for row, layout in pairs if not row.verdicts[layout].passed]


def _count(rows: Sequence[Row], layout: str) -> str:
    refused = sum(row.verdicts[layout].kind == "refused" for row in rows if layout in row.verdicts)
    day = max((row.days[layout] for row in rows if layout in row.days), default="")
    counts = _passed(rows, layout), _exact(rows, layout), refused, _run(rows, layout)
    return f"| {layout} | {' | '.join(map(str, counts))} | {day} |"


def _run(rows: Sequence[Row], layout: str) -> int:
    return sum(layout in row.verdicts for row in rows)


def _passed(rows: Sequence[Row], layout: str) -> int:
    return sum(row.verdicts[layout].passed for row in rows if layout in row.verdicts)


def _exact(rows: Sequence[Row], layout: str) -> int:
    verdicts = [row.verdicts[layout] for row in rows if layout in row.verdicts]
    return sum(verdict.passed and not math.isnan(verdict.float64) for verdict in verdicts)


def _head(layouts: Sequence[str]) -> str:
    return f"| architecture | {' | '.join(layouts)} | worst | noise | sharded |\n|---|{'---|' * (len(layouts) + 3)}"


def _line(row: Row, layouts: Sequence[str]) -> str:
    verdicts = [row.verdicts[layout] for layout in layouts if layout in row.verdicts]
    worst = max((v.worst for v in verdicts if not math.isnan(v.worst)), default=math.nan)
    noise = max(v.noise for v in verdicts)
    first = row.verdicts.get(next(iter(LAYOUTS)), verdicts[0])
    marks = (_mark(row.verdicts.get(layout)) for layout in layouts)
    cells = [row.architecture.name, *marks, f"{worst:.1e}", str(noise), _share(first)]
    return f"| {' | '.join(cells)} |"


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not run"
    if verdict.passed:
        whole = ", whole batch" if verdict.microbatches == 1 else ""
        return f"ok{whole}" + ("" if math.isnan(verdict.float64) else f", float64 {verdict.float64:.0e}")
    return f"**{verdict.kind}**"


def _share(verdict: Verdict) -> str:
    return f"{verdict.sharded} of {verdict.parameters}" if verdict.parameters else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:300]
