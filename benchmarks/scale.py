"""What one rank does on fake process groups of more and more ranks: processor time and memory of each part of a run.

One process for each size, as one rank of a group whose collectives do nothing. The model is small and the same, and every rank has
as many rows at every size, so what grows with the ranks is what the framework and torch do for each of them.

    python benchmarks/scale.py                    # 64 to 16,384 ranks; the table, and a dated file in benchmarks/results
    python benchmarks/scale.py 64 4096            # these sizes, no file
    python benchmarks/scale.py --profile 16384    # where the time goes, in this process

Exit code 4 where a part takes more than 1.5 times as long at the largest size as at the smallest, or as much more memory.
"""

from __future__ import annotations

import cProfile
import datetime
import json
import platform
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import meshwright as mw
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_dtensor.api import from_local
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import fake_group

SIZES = (64, 256, 1024, 4096, 16384)
RUNS = 5
STEPS = 9
GOAL = 1.5
MEMORY = ("memory", "peak")
TINY = ("init", "plan, read")
"""Parts that are not compared: torch's list of all ranks, and a tenth of a millisecond."""

WIDTH = 64


class Net(nn.Module):
    """Blocks of products, as many on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the squares of the result."""
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def plan_for(world: int) -> ParallelPlan:
    """Tensor parallelism in a node, ZeRO over four nodes, data parallelism over the rest, and an axis of one rank, as planners
    write them.
    """
    degrees = {"dp": world // 32, "zero": 4, "cp": 1, "tp": 8}
    return ParallelPlan.from_dict(
        {
            "world_size": world,
            "degrees": degrees,
            "strategies": {"dp": "data", "zero": "zero", "cp": "context", "tp": "tensor"},
            "zero": {"stage": 2},
            "parameters": [
                {"pattern": "layers.*.1.*", "placement": {"tp": "S(0)"}},
                {"pattern": "layers.*.3.weight", "placement": {"tp": "S(1)"}},
            ],
        }
    )


def warm_up() -> None:
    """Import all that torch and the framework import on first use, which takes as long at every size."""
    import torch._dynamo

    torch._dynamo.config  # noqa: B018


def measure(world: int, clock: Callable[[], float] = time.process_time) -> dict[str, float]:
    """Seconds of processor time of each part, and the peak of memory in MiB, as a rank in the middle.

    `clock`: what is read before and after each part; a count of calls instead of seconds, say.
    """
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = clock()
        result = work()
        seconds[name] = clock() - began
        return result

    text = plan_for(world).to_json()
    torch.manual_seed(0)
    model = Net()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ExitStack() as group:
        timed("init", lambda: (group.enter_context(fake_group(world, world // 2 + 1)), mw.init("cpu")))
        plan = timed("plan, read", lambda: ParallelPlan.from_json(text))
        model = timed("parallelize", lambda: mw.parallelize(model, plan))
        optimizer = torch.optim.AdamW(model.parameters())
        rows = from_local(
            torch.randn(4, WIDTH),
            next(model.parameters()).device_mesh,
            [0, 0, "I", "I"],
            (4 * world // 8, WIDTH),
        )

        def step() -> None:
            model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()

        timed("first step", step)
        steps = []
        for _ in range(STEPS):
            timed("step", step)
            steps.append(seconds["step"])
        seconds["step"] = statistics.median(steps)
        timed("save planning", lambda: plan_save(model, optimizer))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**seconds, "memory": (after - before) / 1024, "peak": after / 1024}


def plan_save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All that a rank does before it writes; here it writes all that it holds, since no rank 0 is there to send its share."""
    held: list[Any] = []

    def to_first(ranks: Ranks, catalog: Any) -> None:
        held.extend((key, box) for key, (_, _, boxes) in catalog.items() for box in boxes)
        sent(ranks, catalog)

    sent = Ranks.to_first
    with (
        patch.object(Ranks, "to_first", to_first),
        patch.object(Ranks, "from_first", lambda ranks, pieces: held),
    ):
        mw.prepare_save(model, optimizer=optimizer)


def apart(world: int) -> dict[str, float]:
    """The medians of several processes of their own, one after the other."""
    command = [sys.executable, __file__, "--here", str(world)]
    outputs = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(RUNS)
    )
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def table(results: dict[int, dict[str, float]]) -> str:
    """The figures as Markdown, with the ratio of the largest size to the smallest."""
    sizes = sorted(results)
    lines = ["| part | " + " | ".join(f"{size:,}" for size in sizes) + " | largest / smallest |"]
    lines.append("|---" * (len(sizes) + 2) + "|")
    for name in results[sizes[0]]:
        unit, factor = ("MiB", 1.0) if name in MEMORY else ("ms", 1e3)
        cells = [f"{factor * results[size][name]:.2f}" for size in sizes]
        lines.append(f"| {name}, {unit} | {' | '.join(cells)} | {ratio(name, results):.2f} |")
    return "\n".join(lines)


def ratio(name: str, results: dict[int, dict[str, float]]) -> float:
    """How many times as much the largest size takes as the smallest."""
    return results[max(results)][name] / results[min(results)][name]


def report(results: dict[int, dict[str, float]]) -> str:
    """The dated file."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    text = f"""# Scale on fake process groups, {today}

`python benchmarks/scale.py`, {versions}, {platform.machine()}. Processor time and memory of one rank; medians of {RUNS} processes
for each size. The degrees are dp x zero 4 x cp 1 x tp 8, and dp grows. "init" is torch's `init_process_group`, which notes every
rank; a real group also waits for the others. "save planning" is that of every rank but the first, which divides the work. "peak"
is of the whole process, most of it imports; "memory" is its growth from the model on.

{table(results)}
"""
    return text


def main() -> int:
    """Measure the sizes, each in processes of their own."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--here"]:
        warm_up()
        print(json.dumps(measure(int(arguments[1]))))
        return 0
    if arguments[:1] == ["--profile"]:
        warm_up()
        profile = cProfile.Profile()
        profile.runcall(measure, int(arguments[1]))
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        return 0
    sizes = tuple(map(int, arguments)) or SIZES
    results = {size: apart(size) for size in sizes}
    print(table(results))
    if not arguments:
        text = report(results)
        date = text.splitlines()[0].rpartition(" ")[2]
        (Path(__file__).parent / "results" / f"scale-{date}.md").write_text(text)
    over = [name for name in results[min(sizes)] if ratio(name, results) > GOAL and name not in TINY]
    print(
        f"more than {GOAL} times as much: {', '.join(over)}"
        if over
        else f"nothing takes more than {GOAL} times as much"
    )
    return 4 if over else 0


if __name__ == "__main__":
    sys.exit(main())
