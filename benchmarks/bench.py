"""All comparisons of docs/benchmarks.md, one after the other, and the page from their figures.

    tox run -e bench                                      # everything: about 25 minutes on two cores that do nothing else
    python benchmarks/bench.py --quick --out DIR          # every part once, tiny: whether it works; two minutes, no page
    python benchmarks/bench.py --only dispatch training   # these parts; the others are taken from the newest file of results

Figures go to benchmarks/results/bench-DATE.json, and render.py makes the page and its plots of that file alone.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import data_parallel
import peer_steps
import pipeline_step
import planner_scale
from peers.model import Sizes
from render import newest, render

HERE = Path(__file__).parent
RESULTS = HERE / "results"
VERSIONS = ("meshwright", "torch", "transformers", "accelerate", "deepspeed", "scipy")
TINY = peer_steps.TINY


@dataclass(frozen=True)
class Effort:
    """How much of everything.

    Attributes:
        sizes: of the model of training steps.
        rounds: pairs of steps.
        memory_runs: of training steps, in processes of their own.
        dispatch: (width, repeats, steps) of benchmarks/dispatch.py.
        models: of benchmarks/data_parallel.py, and its pairs of steps.
        pipelines: (ranks, width, layers, microbatches, pairs of steps) of benchmarks/pipeline_step.py.
        checkpoint: gigabytes and rounds.
        plans: cases of benchmarks/planner_scale.py, and how often each is planned.
    """

    sizes: Sizes = field(default_factory=Sizes)
    rounds: int = 21
    memory_runs: int = 2
    dispatch: tuple[tuple[int, int, int], ...] = ((128, 15, 10), (512, 15, 4))
    models: tuple[tuple[str, ...], int] = (("dp", "zero1", "zero2", "zero3"), 7)
    pipelines: tuple[tuple[int, int, int, int, int], ...] = ((2, 512, 8, 8, 21), (4, 512, 8, 8, 21))
    checkpoint: tuple[float, int] = (1.0, 5)
    plans: tuple[tuple[str, ...], int] = (tuple(planner_scale.CASES), 3)


QUICK = Effort(TINY, 2, 0, ((32, 1, 1),), (("dp",), 1), ((2, 16, 4, 4, 1),), (0.07, 1), (("llama-8b-8",), 1))


def dispatch(effort: Effort) -> list[dict[str, Any]]:
    """Each width in a process of its own."""
    results = []
    for width, repeats, steps in effort.dispatch:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "dispatch.json"
            arguments = ["--hidden", str(width), "--repeats", str(repeats), "--steps", str(steps)]
            run("dispatch.py", *arguments, "--json", str(file))
            results.append({"width": width, "ms": json.loads(file.read_text())["ms"]})
    return results


def training_steps(effort: Effort) -> list[dict[str, Any]]:
    """Every layout against its peers."""
    return [
        asdict(result)
        for result in peer_steps.compare_all(
            lambda c: True, effort.sizes, effort.rounds, effort.memory_runs, effort.rounds
        )
    ]


def models(effort: Effort) -> list[dict[str, Any]]:
    """GPT-2 of transformers against torch's data parallelism."""
    names, rounds = effort.models
    return [data_parallel.compare("gpt2", 2, name, rounds) for name in names]


def pipelines(effort: Effort) -> list[dict[str, Any]]:
    """Stacks of MLPs against torch's runtime."""
    return [
        pipeline_step.compare(ranks, width, layers, microbatches, rounds)
        for ranks, width, layers, microbatches, rounds in effort.pipelines
    ]


def checkpoint(effort: Effort) -> dict[str, Any]:
    """Saving and loading, next to torch's and the raw disk."""
    gigabytes, rounds = effort.checkpoint
    # on the disk of the checkout, which git ignores there; the system's own folder may be memory
    disk = HERE.parent / "build"
    disk.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        arguments = ["--gigabytes", str(gigabytes), "--rounds", str(rounds), "--folder", folder, "--json"]
        result: dict[str, Any] = json.loads(run("checkpoint.py", *arguments).splitlines()[-1])
    return result


def plans(effort: Effort) -> list[dict[str, Any]]:
    """Planning, each time in a process of its own."""
    cases, runs = effort.plans
    results = []
    for case in cases:
        measured = [json.loads(run("planner_scale.py", "--here", case).splitlines()[-1]) for _ in range(runs)]
        results.append({**measured[0], "cpu_seconds": [result["cpu_seconds"] for result in measured]})
    return results


PARTS: dict[str, Callable[[Effort], Any]] = {
    "dispatch": dispatch,
    "training": training_steps,
    "models": models,
    "pipelines": pipelines,
    "checkpoint": checkpoint,
    "plans": plans,
}


def run(script: str, *arguments: str) -> str:
    """The output of one of the other benchmarks; its errors are shown."""
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def processor() -> str:
    """The model of the CPU as the system names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    """What the figures were taken on; no name of it."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of what takes part, as far as it is installed."""
    installed = {}
    for name in VERSIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str:
    """The commit of the checkout, with "+" where files were changed."""
    try:
        output = subprocess.run(
            ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny; no page is written")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    effort = QUICK if options.quick else Effort()
    document: dict[str, Any] = {"machine": machine(), "versions": versions(), "parts": {}}
    if len(options.only) < len(PARTS) and not options.quick:
        document["parts"] = parts_of(newest(RESULTS), document)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    for part in options.only:
        start = time.monotonic()
        figures = PARTS[part](effort)
        minutes = round((time.monotonic() - start) / 60, 1)
        document["parts"][part] = {"date": date, "commit": commit(), "minutes": minutes, "figures": figures}
        print(f"{part}: {minutes} minutes", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"bench-{date}.json"
    write(document, file)
    if options.out == RESULTS:
        render(file)


def parts_of(file: Path, document: dict[str, Any]) -> dict[str, Any]:
    """The parts of an earlier run, which was on the same machine with the same versions; else an error."""
    before = json.loads(file.read_text())
    for name in ("machine", "versions"):
        if before[name] != document[name]:
            raise SystemExit(
                f"{file.name} was taken with {name} {before[name]}, this is {document[name]}: figures of both on a page "
                "cannot be compared; run all parts, without --only"
            )
    parts: dict[str, Any] = before["parts"]
    return parts


def write(document: dict[str, Any], file: Path) -> None:
    """As JSON, a line for each part."""
    fields = [f'"{name}": {json.dumps(document[name])}' for name in ("machine", "versions")]
    parts = [f'"{name}": {json.dumps(shortened(part))}' for name, part in document["parts"].items()]
    text = ",\n".join([*fields, '"parts": {\n' + ",\n".join(parts) + "\n}"])
    file.write_text("{" + text + "}\n")


def shortened(value: Any) -> Any:
    """Numbers with nine digits, those of a float32, anywhere inside."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    main()
