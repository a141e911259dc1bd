"""The results with compiled regions as a page of docs/."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import torch

from .catalogue import architectures
from .judge import TOLERANCES
from .store import Row


def compiled_page(rows: Sequence[Row], layouts: Sequence[str]) -> str:
    """The whole of docs/compiled-architectures.md."""
    unbuildable = sum(bool(row.unbuildable) for row in rows)
    lines = [
        "# Architectures with compiled regions",
        "",
        "The architectures of [architectures.md](architectures.md) with `compile=True` (the repeated blocks; all parts of a model",
        "that has none), in training mode. The third step is compared with that of one device, uncompiled: the loss, every",
        f"gradient and every buffer, each to {TOLERANCES[torch.float32]:g} of its own largest value (what float32 cannot",
        "decide, float64 does). Random numbers are equal, dropout and all.",
        "",
        "*tp2 recorded*: the graphs run operation by operation (`aot_eager`); *tp2",
        "compiled*: inductor compiles them. Written by `python -m integration_tests.architectures --layout ... --write PATH`,",
        f"in parts with `--store`: {len(rows)} of the {len(architectures())} classes so far, of which {unbuildable} have no tiny",
        "form that trains.",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}; "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "meshwright"))
        + f"; Python {platform.python_version()}, CPU, gloo.",
        "",
        "| layout | run | equal | refused | wrong or failed | with compiled calls | compiled calls | other calls |",
        "|---|---|---|---|---|---|---|---|",
        *(_count(rows, layout) for layout in layouts),
        "",
        "*Compiled calls*: of regions, in three steps; *other calls*: those that ran as they are, with a reason. The first two",
        "calls of each kind show what the code reads and are not counted.",
        "",
    ]
    for layout in layouts:
        ran = [(row, row.verdicts[layout]) for row in rows if layout in row.verdicts]
        lines += [
            f"## {layout}",
            "",
            "| architecture | result | worst | compiled calls | other calls | why others are not compiled |",
            "|---|---|---|---|---|---|",
        ]
        for row, verdict in ran:
            why = "; ".join(verdict.eager) if verdict.passed else verdict.reason
            result = "equal" if verdict.passed else f"**{verdict.kind}**"
            counts = f"{verdict.compiled} | {verdict.calls - verdict.compiled}"
            lines.append(
                f"| {row.architecture.name} | {result} | {verdict.worst:.1e} | {counts} | {_cell(why)} |"
            )
        lines.append("")
    return "\n".join(lines)


def _count(rows: Sequence[Row], layout: str) -> str:
    verdicts = [row.verdicts[layout] for row in rows if layout in row.verdicts]
    kinds = Counter(verdict.kind for verdict in verdicts)
    passed, refused = kinds["passed"], kinds["refused"]
    compiled = sum(verdict.compiled for verdict in verdicts)
    cells = [
        *(len(verdicts), passed, refused, len(verdicts) - passed - refused),
        *(sum(verdict.compiled > 0 for verdict in verdicts), compiled),
        sum(verdict.calls for verdict in verdicts) - compiled,
    ]
    return f"| {layout} | {' | '.join(map(str, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]
