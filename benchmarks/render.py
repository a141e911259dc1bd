"""The page docs/benchmarks.md and its plots, made of the figures of one file of results and of nothing else.

    python benchmarks/render.py [benchmarks/results/bench-DATE.json]

Without an argument: the newest file. A test holds the page against it. Ratios are medians of pairs of steps that took turns, with
the quartiles; below 1 ours is faster or smaller.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
PLOTS = HERE.parent / "docs" / "_static" / "benchmarks"
TEMPLATE = HERE / "page.md.j2"
OTHERS = {"accelerate": "accelerate", "deepspeed": "DeepSpeed"}
"""Packages of peers that may be missing, and their names."""


@dataclass(frozen=True)
class Ratio:
    """Of ours to a peer's, over pairs: the median and the quartiles."""

    median: float
    low: float
    high: float

    @property
    def lost(self) -> bool:
        """Whether the peer is better, in the two digits that are shown."""
        return round(self.median, 2) > 1.0

    def __str__(self) -> str:
        text = f"{self.median:.2f}"
        spread = f" ({self.low:.2f} to {self.high:.2f})" if self.low < self.high else ""
        return f"**{text}** ✗{spread}" if self.lost else text + spread


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Pair by pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(ratios) < 2:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


@dataclass(frozen=True)
class Row:
    """Training steps of one layout, ours against a peer's."""

    name: str
    section: str
    ranks: int
    peer: str
    script: str
    layout: str
    lines: tuple[int, int]
    error: str = ""
    milliseconds: float = 0.0
    time: Ratio | None = None
    memory: Ratio | None = None
    mebibytes: float = 0.0
    apart: float = 0.0


def _row(result: dict[str, Any]) -> Row:
    """Of what peer_steps.py has measured."""
    comparison = result["comparison"]
    layout = ", ".join(f"{name}={value!r}" for name, value in comparison["layout"].items())
    row = Row(
        comparison["name"], comparison["section"], comparison["ranks"], comparison["needs"],
        f"{comparison['peer']}.py", layout, tuple(result["lines"]), result["error"],
    )  # fmt: skip
    if not result["seconds"]:
        return row
    ours, theirs = zip(*result["seconds"], strict=True)
    apart = max(abs(a - b) for a, b in zip(*result["losses"], strict=True))
    fields = {
        **vars(row),
        "milliseconds": 1e3 * statistics.median(ours),
        "time": ratio(ours, theirs),
        "apart": apart,
    }
    if result["memory"]:
        ours, theirs = zip(*result["memory"], strict=True)
        fields |= {"memory": ratio(ours, theirs), "mebibytes": statistics.median(ours) / 2**20}
    return Row(**fields)


@dataclass(frozen=True)
class Share:
    """Where the steps of one row go, in milliseconds or in numbers, ours and the peer's; and what ours takes more.

    Attributes:
        thread: processor time of the thread that trains. `fixed`: that of a tiny model with as many layers.
        waited: time in which that thread does not run. `others`: processor time of the other threads.
        calls, collectives, mib: of a step. `mib`: what collectives are given.
        more: milliseconds of a step that ours takes more than the peer.
    """

    row: Row
    thread: tuple[float, float]
    fixed: tuple[float, float]
    waited: tuple[float, float]
    others: tuple[float, float]
    calls: tuple[float, float]
    collectives: tuple[float, float]
    mib: tuple[float, float]
    more: float

    @property
    def parts(self) -> dict[str, float]:
        """What ours takes more, in parts."""
        fixed, thread = self.fixed[0] - self.fixed[1], self.thread[0] - self.thread[1]
        waited = self.waited[0] - self.waited[1]
        return {
            "fixed": fixed,
            "sized": thread - fixed,
            "waited": waited,
            "rest": self.more - thread - waited,
        }


def _share(row: Row, result: dict[str, Any]) -> Share | None:
    """None where it was not measured."""
    if not result.get("work") or not result.get("fixed"):
        return None
    ours, theirs = result["work"]

    def ms(name: str) -> tuple[float, float]:
        return 1e3 * statistics.median(ours[name]), 1e3 * statistics.median(theirs[name])

    fixed = tuple(1e3 * statistics.median(side) for side in zip(*result["fixed"], strict=True))
    whole = tuple(1e3 * statistics.median(side) for side in zip(*result["seconds"], strict=True))
    return Share(
        row, ms("thread"), (fixed[0], fixed[1]), ms("waited"), ms("others"), (ours["calls"], theirs["calls"]),
        (ours["collectives"], theirs["collectives"]), (ours["nbytes"] / 2**20, theirs["nbytes"] / 2**20), whole[0] - whole[1],
    )  # fmt: skip


def _pairs(result: dict[str, Any]) -> dict[str, Any]:
    """A comparison of another script, with the ratio of its pairs."""
    ours, theirs = zip(*result["seconds"], strict=True)
    return {**result, "milliseconds": 1e3 * statistics.median(ours), "time": ratio(ours, theirs)}


def _dispatch(result: dict[str, Any]) -> dict[str, Any]:
    """One width: steps without communication."""
    ms = result["ms"]
    return {
        "width": result["width"],
        "ms": {name: statistics.median(times) for name, times in ms.items()},
        "over_plain": ratio(ms["meshwright"], ms["plain"]),
        "of_dtensor": ratio(ms["meshwright"], ms["dtensor"]),
    }


def _files(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Saving and loading: speed, and ours against each of the others."""
    rows, seconds = [], {row["name"]: row["seconds"] for row in result["rows"]}
    for row in result["rows"]:
        kind, _, what = row["name"].partition(": ")
        ours = seconds.get(f"{kind}: meshwright")
        against = None if ours is None or what == "meshwright" else ratio(ours, row["seconds"])
        median = statistics.median(row["seconds"])
        rows.append(
            {
                "kind": kind,
                "what": what,
                "seconds": median,
                "speed": result["bytes"] / median / 1e9,
                "against": against,
            }
        )
    return rows


def facts(document: dict[str, Any]) -> dict[str, Any]:
    """What the template shows."""
    parts = {name: part["figures"] for name, part in document["parts"].items()}
    rows = [_row(result) for result in parts.get("training", ())]
    shares = [_share(row, result) for row, result in zip(rows, parts.get("training", ()), strict=True)]
    plans = [{**plan, "seconds": statistics.median(plan["cpu_seconds"])} for plan in parts.get("plans", ())]
    compared = [row.time for row in rows if row.time is not None]
    results: dict[str, Any] = {
        "rows": rows,
        "shares": [share for share in shares if share is not None],
        "models": [_pairs(result) for result in parts.get("models", ())],
        "pipelines": [_pairs(result) for result in parts.get("pipelines", ())],
        "dispatch": [_dispatch(result) for result in parts.get("dispatch", ())],
        "checkpoint": parts.get("checkpoint"),
        "files": _files(parts["checkpoint"]) if "checkpoint" in parts else [],
        "plans": plans,
    }
    compared += [pair["time"] for pair in results["models"] + results["pipelines"]]
    return {
        **results, "machine": document["machine"], "versions": document["versions"], "parts": document["parts"],
        "others": OTHERS, "lost": sum(time.lost for time in compared), "compared": len(compared),
        "minutes": sum(part["minutes"] for part in document["parts"].values()),
    }  # fmt: skip


def page(document: dict[str, Any], source: str) -> str:
    """The text of the page; `source`: the name of the file of results."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **facts(document), source=source
    )


def digest(file: Path) -> str:
    """Of the figures that a plot was drawn from."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def draw(shown: dict[str, Any], folder: Path, figures: str) -> None:
    """The plots, as SVG; `figures`: the digest that they carry."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "meshwright", "font.size": 9})
    folder.mkdir(parents=True, exist_ok=True)

    def keep(name: str) -> None:
        pyplot.tight_layout()
        pyplot.savefig(folder / name, metadata={"Date": None, "Creator": None, "Description": figures})
        pyplot.close()

    rows = [row for row in shown["rows"] if row.time is not None]
    names = [f"{row.name}, {row.script.removesuffix('.py')}" for row in rows]
    _, axes = pyplot.subplots(1, 2, figsize=(8, 0.8 + 0.26 * max(len(rows), 1)), sharey=True)
    for axis, ratios, title in (
        (axes[0], [row.time for row in rows], "step time"),
        (axes[1], [row.memory for row in rows], "peak memory"),
    ):
        _ratios(axis, names, ratios, f"{title}, ours / peer's")
    keep("ratios.svg")
    files = [row for row in shown["files"] if row["kind"] in ("save", "load")]
    _, axis = pyplot.subplots(figsize=(8, 0.8 + 0.24 * max(len(files), 1)))
    colours = ["C0" if row["what"] == "meshwright" else "0.7" for row in files]
    axis.barh(
        [f"{row['kind']}: {row['what']}" for row in files], [row["speed"] for row in files], color=colours
    )
    axis.invert_yaxis()
    axis.set_xlabel("GB/s")
    keep("checkpoint.svg")


def _ratios(axis: Any, names: Sequence[str], ratios: Iterable[Ratio | None], label: str) -> None:
    """Medians with quartiles, and a line at 1."""
    for place, value in enumerate(ratios):
        if value is not None:
            spread = [[max(value.median - value.low, 0)], [max(value.high - value.median, 0)]]
            axis.errorbar(
                value.median, place, xerr=spread, fmt="o", color="C3" if value.lost else "C0", capsize=2
            )
    axis.axvline(1, color="0.5", linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel(label)


def newest(folder: Path) -> Path:
    """The file of results with the latest date."""
    files = sorted(folder.glob("bench-*.json"))
    if not files:
        raise SystemExit(f"no bench-*.json in {folder}: run benchmarks/bench.py first")
    return files[-1]


def render(file: Path, to: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write the page and its plots."""
    document = json.loads(file.read_text(encoding="utf-8"))
    to.write_text(page(document, file.name), encoding="utf-8")
    draw(facts(document), plots, digest(file))


if __name__ == "__main__":
    render(Path(sys.argv[1]) if len(sys.argv) > 1 else newest(HERE / "results"))
