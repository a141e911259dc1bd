"""The results as a page of docs/, and as lines on the terminal."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from architectures.judge import TOLERANCES, Verdict

from .catalogue import Model
from .layouts import LAYOUTS
from .store import Results

KINDS = ("passed", "refused", "wrong", "hang", "error")
_HEAD = """# Models of other packages

{models} models of {packages} packages from PyPI, unmodified, built small, in training mode (dropout and all): planned
automatically with these pins and run for one step. Compared with one device: initial values (bit for bit), the loss, every
gradient and every buffer, each to {tolerance:g} of its own largest value in float32, and the state of the generator after the
step. Written by `python -m integration_tests.third_party`; the models of a package in processes of their own.

{today}; {versions}; Python {python}, CPU, gloo.

"""
_LEGEND = """
*Equal*: as on one device. Of these, *by float64*: some value differs by more in float32, but no further than rounding moves it on
one device (16 times of what one rounding of the weights does to it there, or as far as that moves any value of its kind); the
run is repeated in float64 and must agree to {tolerance:g} in all that differed. *Refused*: by one of our errors,
when planning or in `parallelize`. *Wrong*: other values. *Error*: anything else, such as a plan that fails at its first step.
"""


def page(chosen: Sequence[Model], results: Results) -> str:
    """The whole of docs/third-party.md."""
    ran = _ran(chosen, results)
    names = ("torch", "meshwright")
    text = _HEAD.format(
        models=len(ran),
        packages=len({model.package for model in ran}),
        tolerance=TOLERANCES[torch.float32],
        today=datetime.datetime.now(tz=datetime.UTC).date(),
        versions=", ".join(f"{name} {version(name)}" for name in names),
        python=platform.python_version(),
    )
    text += summary(chosen, results) + "\n" + _LEGEND.format(tolerance=TOLERANCES[torch.float64])
    for field in dict.fromkeys(model.field for model in ran):
        text += f"\n## {field}\n\n| package | model | {' | '.join(LAYOUTS)} | worst |\n|---|---|{'---|' * len(LAYOUTS)}---|\n"
        text += "".join(_line(model, _verdicts(model, results)) for model in ran if model.field == field)
    left = failures(chosen, results)
    for title, refused in (("What is refused, and why", True), ("What fails, and why", False)):
        rows = [row for row in left if (row[2].kind == "refused") == refused]
        if rows:
            text += f"\n## {title}\n\n| model | layout | what | reason |\n|---|---|---|---|\n"
            text += "".join(
                f"| {model.key} | {layout} | {verdict.kind} | {_cell(verdict.reason)} |\n"
                for model, layout, verdict in rows
            )
    return text


def summary(chosen: Sequence[Model], results: Results) -> str:
    """A table of counts, in Markdown."""
    lines = ["| layout | run | equal | by float64 | refused | wrong | hang | error |", "|---|" + "---:|" * 7]
    for layout in LAYOUTS:
        verdicts = [
            result[layout]
            for result in (_verdicts(m, results) for m in _ran(chosen, results))
            if layout in result
        ]
        counts = {kind: sum(verdict.kind == kind for verdict in verdicts) for kind in KINDS}
        exact = sum(verdict.passed and not math.isnan(verdict.float64) for verdict in verdicts)
        equal = f"{counts['passed']} ({counts['passed'] / len(verdicts):.1%})" if verdicts else "0"
        rest = " | ".join(str(counts[kind]) for kind in KINDS[1:])
        lines.append(f"| {layout} | {len(verdicts)} | {equal} | {exact} | {rest} |")
    return "\n".join(lines)


def failures(chosen: Sequence[Model], results: Results) -> list[tuple[Model, str, Verdict]]:
    """What did not pass: model, layout, verdict. A model that cannot be built is one that fails."""
    return [
        (model, layout, verdict)
        for model in chosen
        for layout, verdict in _verdicts(model, results).items()
        if not verdict.passed
    ]


def _ran(chosen: Sequence[Model], results: Results) -> list[Model]:
    return [model for model in chosen if model.key in results]


def _verdicts(model: Model, results: Results) -> dict[str, Verdict]:
    result = results.get(model.key, {})
    return dict.fromkeys(LAYOUTS, Verdict("error", result)) if isinstance(result, str) else result


def _line(model: Model, verdicts: dict[str, Verdict]) -> str:
    worst = max((v.worst for v in verdicts.values() if not math.isnan(v.worst)), default=math.nan)
    cells = [
        _package(model.package),
        model.name,
        *(_mark(verdicts.get(name)) for name in LAYOUTS),
        f"{worst:.1e}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not run"
    if verdict.passed:
        return "equal" if math.isnan(verdict.float64) else "equal, float64"
    return verdict.kind if verdict.kind == "refused" else f"**{verdict.kind}**"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:400]
