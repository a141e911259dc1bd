"""What a run shows and writes: one progress line on a terminal, plain lines in a log, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from meshwright.recipes.schema import Recipe
from meshwright.runs.stragglers import Straggler
from meshwright.training.utilisation import Utilisation
from meshwright_dtensor.devices import device_of
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.console import Console


class Log:
    """The log of one run; on ranks other than 0 its methods do nothing."""

    def __init__(self, recipe: Recipe, active: bool, as_json: bool) -> None:
        """as_json: the last record is all of stdout, and text goes to stderr."""
        self.recipe, self.active, self.as_json = recipe, active, as_json
        self.out, self.record = Path(recipe.out), dict[str, Any]()
        self.console = Console(stderr=as_json, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # a log has no use for a bar
        hidden = not (active and self.console.is_terminal)
        self.progress = Progress(*columns, console=self.console, transient=True, disable=hidden)
        self.task = self.progress.add_task("training", total=recipe.steps)
        self.board: Any = None
        self.utilisation = Utilisation()
        self.slow: list[int] = []
        self.told: set[str] = set()

    def begin(self, model: nn.Module, step: int, flops: float | None = None) -> None:
        """Show the plan, and take up the files of the run after `step` steps. flops: operations of the model in a step."""
        if not self.active:
            return
        plan: Any = model.parallel_plan
        self.out.mkdir(parents=True, exist_ok=True)
        plan.save(self.out / "plan.json")
        (self.out / "recipe.json").write_text(self.recipe.model_dump_json(indent=1, exclude_none=True))
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        self.utilisation = Utilisation.of(plan, flops, self.recipe.precision)
        self.say(plan.explain().partition("\n")[0])
        self.say(f"{type(model).__name__}, {count:.2f}M parameters, from step {step} to {self.recipe.steps}")
        self.file = self.out / "metrics.jsonl"
        # a run that was killed may have gone on after its last checkpoint
        self._keep(step)
        wanted = self.recipe.metrics.tensorboard
        if find_spec("tensorboard") is not None if wanted is None else wanted:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.out / "tensorboard"), purge_step=step + 1)
        self.progress.start()

    def _keep(self, step: int) -> None:
        """Drop the records of later steps, and a last one that is half written."""
        lines = self.file.read_text().splitlines() if self.file.is_file() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self.file.write_text("".join(f"{line}\n" for line in kept))

    def went_back(self, step: int, fault: str) -> None:
        """The run goes on from an earlier step, with the next rows; `fault`: why."""
        if self.active:
            self._keep(step)
            self.write(step, f"{fault}; going on from here with the next rows", {"went_back": fault})

    def damaged(self, step: int, damaged: Mapping[str, str]) -> None:
        """The run goes on after `step` steps, and not from newer checkpoints that are damaged: path -> what is wrong; told once."""
        new = [{"path": path, "damage": damage} for path, damage in damaged.items() if path not in self.told]
        self.told.update(damaged)
        if new:
            text = "; ".join(f"{each['path']} is damaged ({each['damage']})" for each in new)
            self.write(step, f"going on from here, since {text}", {"damaged_checkpoints": new})

    def step(
        self, step: int, loss: float, norm: float, rate: float, batches: list[Any], seconds: float, used: int
    ) -> None:
        """A step is done. used: bytes of the rank with most memory in use."""
        unit = "tokens" if all("input_ids" in batch for batch in batches) else "rows"
        counts = [
            batch["input_ids"].numel() if unit == "tokens" else len(next(iter(batch.values())))
            for batch in batches
        ]
        numbers = {"loss": loss, "grad_norm": norm, "lr": rate, "seconds": seconds, "memory_bytes": used}
        numbers[f"{unit}_per_second"] = speed = sum(counts) / seconds
        numbers |= self.utilisation.figures(seconds)
        share = f"  {numbers['mfu']:.1%} of peak" if "mfu" in numbers else ""
        text = f"loss {loss:.4f}  norm {norm:.3g}  {speed:,.0f} {unit}/s{share}  {human_bytes(used)}"
        self.progress.update(self.task, completed=step, description=text)
        if step % self.recipe.metrics.interval == 0 or step == self.recipe.steps:
            self.write(step, text, numbers)

    def evaluated(self, step: int, loss: float) -> None:
        """The mean loss of an evaluation."""
        self.write(step, f"evaluation: loss {loss:.4f}", {"evaluation_loss": loss})

    def slow_ranks(self, step: int, slow: Sequence[Straggler]) -> None:
        """The ranks that are slow now; a record where they are others than before."""
        ranks = [each.rank for each in slow]
        if ranks != self.slow:
            self.slow = ranks
            shown = [
                f"{each.rank} on {each.host} ({human_seconds(each.seconds)} a step, median {human_seconds(each.median)})"
                for each in slow
            ]
            self.write(
                step, f"slow ranks: {', '.join(shown) or 'none'}", {"slow_ranks": list(map(asdict, slow))}
            )

    def write(self, step: int, text: str, values: dict[str, Any]) -> None:
        """Add a record to the files; in a log, show it."""
        if not self.active:
            return
        self.record |= {"step": step, **values}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items() if self.board else ():
            if not isinstance(value, str):
                self.board.add_scalar(name, len(value) if isinstance(value, list) else value, step)
        if not self.console.is_terminal:
            self.say(f"step {step:>{len(str(self.recipe.steps))}}/{self.recipe.steps}  {text}")

    def end(self, step: int, received: int) -> None:
        """The run is over, or was stopped by a signal; its checkpoint is complete."""
        self.close()
        if not self.active:
            return
        stopped = f"stopped after step {step}; the same command goes on from there"
        self.say(stopped if received else f"done: {step} steps, in {self.out}")
        if self.as_json:
            last = {**self.record, "step": step, "out": str(self.out), "signal": received}
            print(json.dumps(last), flush=True)

    def close(self) -> None:
        """Stop the progress line, whatever happened."""
        self.progress.stop()
        if self.board:
            self.board.close()

    def say(self, text: str) -> None:
        """Print a line, above the progress line."""
        self.progress.console.print(text, markup=False, soft_wrap=True)


def memory(device: torch.device) -> int:
    """The most bytes that this rank has had in use: of its accelerator, or of the process."""
    peak = device_of(device).peak_bytes(device)
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
