"""The command line of the sweep: python -m integration_tests.third_party [--only NAME] [--layout LAYOUT] [--write PATH]."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

from architectures.attempts import attempts
from architectures.judge import Verdict

from .catalogue import Model, models
from .layouts import LAYOUTS
from .store import Results, append, load
from .table import failures, page, summary


def main() -> int:
    """Exit code 0 when every model equals one device or is refused."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.third_party")
    parser.add_argument(
        "--only", action="append", default=[], help="models whose name contains this; repeatable"
    )
    parser.add_argument("--layout", action="append", default=[], choices=list(LAYOUTS), help="repeatable")
    parser.add_argument(
        "--write", type=Path, help="where the page goes; by default docs/third-party.md, if all is run"
    )
    parser.add_argument(
        "--store",
        type=Path,
        help="a file of results: those that passed are not run again, new ones are added",
    )
    arguments = parser.parse_args()
    layouts = arguments.layout or list(LAYOUTS)
    everything = models()
    chosen = [m for m in everything if not arguments.only or any(part in m.key for part in arguments.only)]
    results = load(arguments.store) if arguments.store else {}
    _run(_grouped(chosen, layouts, results), results, arguments.store)
    results = {m.key: results[m.key] for m in chosen if m.key in results}
    print(summary(chosen, results))
    path = arguments.write
    if path is None and len(chosen) == len(everything) and layouts == list(LAYOUTS):
        path = Path(__file__).parents[2] / "docs" / "third-party.md"
    if path is not None:
        path.write_text(page(chosen, results))
        print(f"wrote {path}")
    return int(any(verdict.kind != "refused" for _, _, verdict in failures(chosen, results)))


def _grouped(
    chosen: list[Model], layouts: list[str], results: Results
) -> dict[tuple[str, tuple[str, ...]], list[Model]]:
    """Models by package and the layouts in which they have to be run."""
    groups: dict[tuple[str, tuple[str, ...]], list[Model]] = {}
    for model in chosen:
        result = results.get(model.key, {})
        todo = [n for n in layouts if isinstance(result, str) or n not in result or not result[n].passed]
        if todo:
            groups.setdefault((model.package, tuple(todo)), []).append(model)
    return groups


def _run(
    groups: Mapping[tuple[str, tuple[str, ...]], list[Model]], results: Results, store: Path | None
) -> None:
    start, place, total = time.monotonic(), 0, sum(map(len, groups.values()))
    for (_, names), group in groups.items():
        # new processes for each package: what one changes when it is imported, others do not see
        tried = attempts(group, {name: LAYOUTS[name] for name in names})
        for model, result in zip(group, tried, strict=True):
            earlier = results.get(model.key, {})
            results[model.key] = (
                result if isinstance(result, str) or isinstance(earlier, str) else {**earlier, **result}
            )
            if store:
                append(store, model.key, result)
            place, seconds = place + 1, time.monotonic() - start
            print(f"{place:3}/{total} {seconds:5.0f} s {model.key} {_told(result)}", flush=True)


def _told(result: str | dict[str, Verdict]) -> str:
    if isinstance(result, str):
        return f"not built: {result[:200]}"
    passed = [name for name, verdict in result.items() if verdict.passed]
    told = f"equal: {', '.join(passed) or 'nowhere'}"
    for name, verdict in result.items():
        if not verdict.passed:
            told += f"\n      {name}: {verdict.kind}: {verdict.reason[:400]}"
    return told
