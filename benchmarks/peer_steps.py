"""Training steps of one small Llama: meshwright against the best script by hand for each layout (benchmarks/peers), on real ranks.

    python benchmarks/peer_steps.py [--only dp2,tp2] [--rounds 15] [--memory] [--json FILE]

Ours and the peer's take turns, one step each, in the same processes: the ratio is the median of such pairs of steps. Both train the
same model on the same batch with the same optimizer, and their losses are compared step by step: a peer that does other work
is an error. Memory is that of processes of their own, as in data_parallel.py.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import json
import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peak_memory import peak_of_step
from peers.model import Sizes, Step, batch_of, model_of
from step_work import Work, over_ranks
from taking_turns import timed_pairs

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

PEERS = Path(__file__).parent / "peers"
TOLERANCE = 1e-4
"""Distance of losses, relative: sums in another order, over the first steps."""
Pairs = list[tuple[float, float]]
"""Of ours and of the peer's steps, in turn."""
WARM_UP = 3
MEMORY_RUNS = 3
TINY = Sizes(width=32, inner=64, layers=4, heads=4, vocabulary=128, rows=8, tokens=32)
"""A model whose arithmetic takes next to nothing."""


@dataclass(frozen=True)
class Comparison:
    """A layout of ours and the script that does the same.

    Attributes:
        name: of the layout.
        section: of the page.
        peer: file of benchmarks/peers, without its suffix.
        layout: what our user writes.
        needs: a package that the peer imports.
    """

    name: str
    section: str
    peer: str
    layout: dict[str, Any]
    ranks: int = 2
    experts: int = 0
    needs: str = "torch"

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


COMPARISONS = (
    Comparison("dp2", "data", "ddp", {"dp": 2, "zero": 0}),
    Comparison("zero3", "data", "fsdp", {"zero": 3}),
    Comparison("tp2", "tensor", "tensor", {"tp": 2, "sequence_parallel": False}),
    Comparison("tp2, sequence parallel", "sequence", "sequence", {"tp": 2, "sequence_parallel": True}),
    Comparison(
        "tp2 x dp2", "tensor", "tensor_ddp", {"tp": 2, "dp": 2, "zero": 0, "sequence_parallel": False}, 4
    ),
    Comparison("tp2 x zero3", "tensor", "tensor_fsdp", {"tp": 2, "zero": 3, "sequence_parallel": False}, 4),
    Comparison("ep2", "expert", "experts", {"ep": 2}, experts=4),
    Comparison("cp2", "context", "context", {"cp": 2}),
    Comparison("pp2", "pipeline", "pipeline", {"pp": 2, "microbatches": 8, "schedule": "1f1b"}),
    Comparison("pp4", "pipeline", "pipeline", {"pp": 4, "microbatches": 8, "schedule": "1f1b"}, 4),
    Comparison("dp2", "data", "accelerate_ddp", {"dp": 2, "zero": 0}, needs="accelerate"),
    Comparison("zero3", "data", "deepspeed_zero3", {"zero": 3}, needs="deepspeed"),
)


@dataclass
class Result:
    """A comparison that was run.

    Attributes:
        seconds: of ours and of the peer's step, in turn; empty where the peer is not installed.
        losses: of the first steps, ours and the peer's.
        memory: bytes of ours and of the peer's at the peak, of each run, the mean over ranks.
        work: of ours and of the peer's step, the means over ranks.
        fixed: processor seconds of the thread that trains in steps of a tiny model with as many layers, ours and the peer's:
            what a step costs whatever the sizes are.
        lines: of user code, ours and the peer's.
        error: why the peer has no figures.
    """

    comparison: Comparison
    seconds: Pairs = field(default_factory=list)
    losses: tuple[list[float], list[float]] = ((), ())  # type: ignore[assignment]
    memory: Pairs = field(default_factory=list)
    lines: tuple[int, int] = (0, 0)
    error: str = ""
    work: tuple[Work, ...] = ()
    fixed: Pairs = field(default_factory=list)

    def ratio(self) -> float:
        return statistics.median(a / b for a, b in self.seconds)


def setup(comparison: Comparison, ours: bool, sizes: Sizes) -> Step:
    """The step of one side, in which alone that side's replacements of torch's functions are in force.

    DeepSpeed replaces `linear` for the whole process by a custom `autograd.Function`, which others cannot look into.
    """
    before = dict(vars(F))
    side = importlib.import_module("peers.ours" if ours else f"peers.{comparison.peer}")
    step: Step = side.setup(model_of(sizes), batch_of(sizes), **(comparison.layout if ours else {}))
    replacements = {name: value for name, value in vars(F).items() if before.get(name) is not value}
    if not replacements:
        return step
    stock = {name: before[name] for name in replacements if name in before}
    vars(F).update(stock)

    def with_replacements() -> torch.Tensor | None:
        vars(F).update(replacements)
        try:
            return step()
        finally:
            vars(F).update(stock)

    return with_replacements


def mean_loss(loss: torch.Tensor | None) -> float:
    """The mean over the ranks that have it."""
    totals = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def as_launched(rank: int, ranks: int) -> None:
    """The variables that torchrun sets, which other libraries read."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29531")


def times(
    rank: int, ranks: int, comparison: Comparison, sizes: Sizes, rounds: int
) -> tuple[Pairs, tuple[list[float], list[float]], list[Work]]:
    """Seconds of steps in turn, the losses of the first ones, and the work of this rank."""
    if comparison.needs != "torch":
        as_launched(rank, ranks)
    steps = [setup(comparison, ours, sizes) for ours in (True, False)]
    ours, theirs = ([mean_loss(step()) for _ in range(WARM_UP)] for step in steps)
    works = [Work(), Work()]
    pairs = timed_pairs([functools.partial(w.timed, s) for w, s in zip(works, steps, strict=True)], rounds)
    for work, step in zip(works, steps, strict=True):
        dist.barrier()
        work.counted(step)
    return pairs, (ours, theirs), works


def peak(rank: int, ranks: int, comparison: Comparison, sizes: Sizes, ours: bool) -> int:
    """Bytes of a steady step of one side."""
    if comparison.needs != "torch":
        as_launched(rank, ranks)
    # what importing and planning take is nobody's
    importlib.import_module(f"peers.{comparison.peer}")
    importlib.import_module(mw.auto_parallelize.__module__)
    mw.plan(model_of(sizes), batch_of(sizes), cluster="laptop-cpu", world_size=ranks, **comparison.layout)
    return peak_of_step(functools.partial(setup, comparison, ours, sizes))


def memory_of(comparison: Comparison, sizes: Sizes, runs: int) -> Pairs:
    """Of both sides in turn, each in processes of its own."""
    results = []
    for _ in range(runs):
        pair = []
        for ours in (True, False):
            with RankPool() as pool:
                sizes_of_ranks = pool.run(comparison.ranks, peak, comparison, sizes, ours, timeout=600)
            pair.append(statistics.mean(sizes_of_ranks))
        results.append((pair[0], pair[1]))
    return results


def check_losses(comparison: Comparison, losses: tuple[list[float], list[float]]) -> None:
    """Raise AssertionError unless both sides do the same work."""
    for ours, theirs in zip(*losses, strict=True):
        assert abs(ours - theirs) <= TOLERANCE * abs(theirs), (
            f"{comparison.name}: the losses of ours and of peers/{comparison.peer}.py differ, {losses}: not the same work"
        )


def compare(
    pool: RankPool,
    comparison: Comparison,
    sizes: Sizes,
    rounds: int,
    memory_runs: int = 0,
    fixed_rounds: int = 0,
) -> Result:
    """Run one comparison. A failure is raised, that of another library than torch is in the result."""
    result = Result(comparison, lines=(code_lines(PEERS / "ours.py"), code_lines(peer_file(comparison))))
    if not comparison.installed:
        result.error = f"{comparison.needs} is not installed"
        return result
    sizes = replace(sizes, experts=comparison.experts)
    try:
        result.seconds, result.losses, result.work = measured(pool, comparison, sizes, rounds)
    except Exception as error:
        if comparison.needs == "torch":
            raise
        result.error = f"{comparison.needs} does not run here: {str(error).splitlines()[0]}"
        return result
    check_losses(comparison, result.losses)
    if fixed_rounds:
        tiny = replace(TINY, layers=sizes.layers, experts=sizes.experts)
        with nullcontext(pool) if comparison.needs == "torch" else RankPool() as ranks:
            ours, theirs = measured(ranks, comparison, tiny, fixed_rounds)[2]
        result.fixed = list(zip(ours.thread, theirs.thread, strict=True))
    if memory_runs:
        result.memory = memory_of(comparison, sizes, memory_runs)
    return result


def measured(
    pool: RankPool, comparison: Comparison, sizes: Sizes, rounds: int
) -> tuple[Pairs, Any, tuple[Work, ...]]:
    """What `times` gives, on the first rank; of the work the means over ranks."""
    of_ranks = pool.run(comparison.ranks, times, comparison, sizes, rounds, timeout=600)
    works = zip(*(works for *_, works in of_ranks), strict=True)
    return of_ranks[0][0], of_ranks[0][1], tuple(map(over_ranks, works))


def peer_file(comparison: Comparison) -> Path:
    return PEERS / f"{comparison.peer}.py"


def code_lines(file: Path) -> int:
    """Lines of code of a script, without docstrings, comments and blank ones, and those of functions that it takes from others."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    count = _code_lines(tree, source, 1, len(source.splitlines()))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("peers."):
            if node.module == "peers.model":
                continue
            other = (PEERS / f"{str(node.module).partition('.')[2]}.py").read_text(encoding="utf-8")
            functions = {f.name: f for f in ast.parse(other).body if isinstance(f, ast.FunctionDef)}
            for function in (functions[alias.name] for alias in node.names):
                count += _code_lines(function, other, function.lineno, function.end_lineno or 0)
    return count


def _code_lines(tree: ast.AST, source: str, first: int, last: int) -> int:
    """Of the lines from `first` to `last`, which are those of `tree`."""
    texts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            text = node.body[0]
            texts.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = [
        line.strip()
        for number, line in enumerate(source.splitlines()[first - 1 : last], first)
        if number not in texts
    ]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def compare_all(
    wanted: Callable[[Comparison], bool], sizes: Sizes, rounds: int, memory_runs: int, fixed_rounds: int
) -> list[Result]:
    """Stock peers share a pool of ranks; other libraries, which keep state in a process, have one each."""
    results = []
    with RankPool() as pool:
        for comparison in filter(wanted, COMPARISONS):
            if comparison.needs == "torch":
                results.append(say(compare(pool, comparison, sizes, rounds, memory_runs, fixed_rounds)))
    for comparison in filter(wanted, COMPARISONS):
        if comparison.needs != "torch":
            with RankPool() as pool:
                results.append(say(compare(pool, comparison, sizes, rounds, memory_runs, fixed_rounds)))
    return results


def say(result: Result) -> Result:
    """A line on the console."""
    comparison, lines = result.comparison, result.lines
    text = f"{comparison.name:24s} of {comparison.peer:16s} "
    if result.error:
        text += result.error
    else:
        ratios = sorted(a / b for a, b in result.seconds)
        ours = statistics.median(a for a, _ in result.seconds)
        text += f"{1e3 * ours:6.0f} ms, {result.ratio():.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    if result.memory:
        mine, theirs = (statistics.median(side) for side in zip(*result.memory, strict=True))
        text += f", {mine / 2**20:.0f} MiB, {mine / theirs:.2f}"
    print(f"{text}, {lines[0]} lines of {lines[1]}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="comma-separated names of peers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [c.peer for c in COMPARISONS]
    unknown = set(names) - {c.peer for c in COMPARISONS}
    if unknown:
        parser.error(
            f"--only {','.join(sorted(unknown))}: peers are {', '.join(c.peer for c in COMPARISONS)}"
        )
    runs = MEMORY_RUNS if options.memory else 0
    results = compare_all(lambda c: c.peer in names, Sizes(), options.rounds, runs, options.rounds)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
