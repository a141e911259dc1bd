"""What the main job shows while it runs, and its verdict. Only rank 0 has a report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.demo.train import Options, Outcome, Step
from meshwright.pictures import draw_losses
from meshwright_dtensor.utils.console import Console
from meshwright_dtensor.utils.names import count_of


class Report:
    """Prints the plan, a line a step, a progress bar, the plot's place and one line of verdict."""

    def __init__(self, out: Path, as_json: bool) -> None:
        """out: folder of plan.json, losses.json and losses.png. as_json: JSON to stdout, everything else to stderr."""
        self.out, self.as_json, self.tolerance = out, as_json, 0.0
        # One line of JSON must be the whole of stdout, so the rest moves over.
        self.console = Console(stderr=as_json, highlight=False)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # a log has no use for a bar
        hidden = not self.console.is_terminal
        self.progress = Progress(*columns, console=self.console, transient=True, disable=hidden)

    def planned(self, plan: Any, outcome: Outcome, options: Options) -> None:
        """Explain the plan and head the table of steps."""
        self.tolerance = outcome.tolerance
        self.out.mkdir(parents=True, exist_ok=True)
        plan.save(self.out / "plan.json")
        self.console.print(plan.explain(), markup=False, soft_wrap=True)
        self.console.print(
            f"\n{outcome.model}: {outcome.parameters / 1e6:.2f}M parameters, batch {options.batch_size} x "
            f"{options.sequence_length}, {options.optimizer}, {count_of(outcome.world_size, 'rank')}, compared with one device\n"
        )
        heading = "  step      parallel    one device   difference   seconds: parallel   one"
        self.console.print(heading, soft_wrap=True)
        self.progress.start()
        self.task = self.progress.add_task("training", total=options.steps)

    def stepped(self, step: Step) -> None:
        """Print one step."""
        mark = "" if step.difference <= self.tolerance else "   [red]parted[/red]"
        self.progress.console.print(
            f"  {step.step + 1:4d}  {step.parallel:12.6f}  {step.single:12.6f}   {step.difference:10.1e}   "
            f"{step.parallel_seconds:17.2f}  {step.single_seconds:4.2f}{mark}",
            soft_wrap=True,
        )
        self.progress.advance(self.task)

    def close(self) -> None:
        """Stop the progress bar, whatever happened."""
        self.progress.stop()

    def finished(self, outcome: Outcome) -> None:
        """Write the files and print the verdict."""
        self.close()
        losses, picture = self.out / "losses.json", self.out / "losses.png"
        losses.write_text(json.dumps(outcome.to_dict(), indent=1) + "\n", encoding="utf-8")
        draw_losses(outcome, picture)
        files = f"\nplan: {self.out / 'plan.json'}   losses: {losses}   plot: {picture}"
        self.console.print(files, verdict(outcome), sep="\n", soft_wrap=True)
        if self.as_json:
            sys.stdout.write(json.dumps(outcome.to_dict()) + "\n")


def verdict(outcome: Outcome) -> str:
    """One line: whether the parallel run was the one-device run."""
    first, last, worst = outcome.steps[0], outcome.steps[-1], outcome.worst
    run = f"{outcome.model} on {count_of(outcome.world_size, 'rank')} ({outcome.layout}), {count_of(len(outcome.steps), 'step')}"
    mark, relation = ("PASS", "the same as") if outcome.passed else ("FAIL", "parted from")
    return (
        f"{mark}: {run}: loss {first.parallel:.3f} -> {last.parallel:.3f}, {relation} one device: largest difference "
        f"{worst.difference:.1e} at step {worst.step + 1} (allowed {outcome.tolerance:g})"
    )
