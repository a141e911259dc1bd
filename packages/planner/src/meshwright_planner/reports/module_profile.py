"""`profile_model`: what each module of a model computes, holds and keeps for the backward pass, on one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.rules.composites.base import Composite
from meshwright_dtensor.strategy.plan_request import PRECISIONS, unknown
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_planner.recompute.region import Region
from meshwright_planner.recompute.rules import recompute_rules
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.flops import backward_flops, by_name, forward_flops
from meshwright_planner.trace.quotient import Quotient, quotient
from meshwright_planner.trace.recorder.borrow_model import without_garbage_collection
from meshwright_planner.trace.recorder.record import record
from meshwright_planner.trace.tape import Saved, Tape


@dataclass(frozen=True)
class ModuleProfile:
    """One module with all that is in it, or all copies of a block together.

    Args:
        name: its full name, "" of the model itself; of copies that of the first.
        kind: its class.
        copies: how many modules this is of.
        forward_flops, backward_flops: floating-point operations of products, convolutions and attention.
        again_flops: those of the forward pass that run once more in the backward pass.
        parameters, parameter_bytes: number and bytes of distinct parameters, in the dtype that the model has them in.
        saved_bytes: what autograd keeps for the backward pass, parameters aside; a storage counts where it is kept first.
    """

    name: str
    kind: str
    copies: int = 1
    forward_flops: int = 0
    backward_flops: int = 0
    again_flops: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class ModelProfile:
    """What the modules of a model do with one batch on one device. `print` it for a table.

    Args:
        modules: every module by itself, the model first, in the model's order.
        blocks: the same with repeated blocks folded: a row stands for all copies, and is their sum.
        precision, recompute: as they were asked for.
    """

    modules: tuple[ModuleProfile, ...]
    blocks: tuple[ModuleProfile, ...]
    precision: str | None = None
    recompute: str | None = None

    @property
    def total(self) -> ModuleProfile:
        """The whole model."""
        return self.modules[0]

    def __getitem__(self, name: str) -> ModuleProfile:
        """A module by its full name."""
        found = next((row for row in self.modules if row.name == name), None)
        if found is None:
            raise UsageError(unknown("module", name, [row.name for row in self.modules]))
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "precision": self.precision,
            "recompute": self.recompute,
            "total": asdict(self.total),
            "modules": [asdict(row) for row in self.modules],
            "blocks": [asdict(row) for row in self.blocks],
        }

    def __str__(self) -> str:
        """A table of the folded modules."""
        head = ("module", "class", "copies", "parameters", "bytes", "forward", "backward", "again", "kept")
        lines = [head, *(_cells(row) for row in self.blocks)]
        widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
        said = ["  ".join(_placed(cell, n, widths[n]) for n, cell in enumerate(line)) for line in lines]
        return "\n".join(line.rstrip() for line in said)


def profile_model(
    model: nn.Module, batch: Any, *, precision: str | None = None, recompute: str | None = None
) -> ModelProfile:
    """Run `model` once on fake tensors, and say what its modules compute, hold and keep. The model is left untouched.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of what it is called with: a dict of keyword arguments, a tuple of arguments, or a tensor.
        precision: "bf16", "fp16" or "fp32": what a float32 model is computed in; None is its own dtype.
        recompute: "full", "alternate" or "selective" for every repeated block, or a pattern of module names, as in `plan`;
            None keeps everything.

    Raises:
        UsageError: an option cannot be had, or the model does not take the batch.
        UnsupportedError: the model looks at data and is too large for a real run.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(unknown("precision", precision, PRECISIONS))
    if recompute is not None and (not isinstance(recompute, str) or not recompute):
        raise UsageError(f"recompute={recompute!r} is no policy and no pattern of module names; give a text")
    rules, example = recompute_rules(model, recompute), Batch.of(batch)
    book = RuleBook.default()
    with without_garbage_collection():
        tape = record(
            model, example, book.composites, None if precision in (None, "fp32") else DTYPES[str(precision)]
        )
        merged = quotient(tape)
    rules = recompute_rules(model, recompute, tape.calls)
    composites = by_name(book.composites)
    ahead = [forward_flops(node, tape.values, composites) for node in tape.nodes]
    region = Region(tape, merged, ahead.__getitem__, rules)
    saved = region.saved(tape) if rules else tape.saved
    rows = _rows(model, tape, ahead, region.repeated, saved, _unused(tape, composites))
    return ModelProfile(tuple(rows.values()), tuple(_folded(rows, merged)), precision, recompute)


def _rows(
    model: nn.Module,
    tape: Tape,
    ahead: list[float],
    repeated: frozenset[int],
    saved: Iterable[Saved],
    unused: Iterable[tuple[str, int, int]],
) -> dict[str, ModuleProfile]:
    """Module -> its figures, the model first."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in tape.modules}
    for module, forward, again in unused:
        for name in _within(module):
            sums[name]["forward_flops"] += forward
            sums[name]["again_flops"] += again
    for index, node in enumerate(tape.nodes):
        forward, back = (
            round(n)
            for n in (ahead[index], backward_flops(node, tape.values, tape.flows[index], ahead[index]))
        )
        for name in _within(node.module):
            sums[name]["forward_flops"] += forward
            sums[name]["backward_flops"] += back
            sums[name]["again_flops"] += forward * (tape.again[index] + (index in repeated))
    seen: set[int] = set()
    for item in saved:
        if item.root is not None:
            if item.root in seen or (tape.values[item.root].name or "").startswith("param:"):
                continue
            seen.add(item.root)
        for name in _within(tape.nodes[item.by].module):
            sums[name]["saved_bytes"] += item.nbytes
    found = {}
    for name, module in model.named_modules():
        own = list(module.parameters())
        held = sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
        found[name] = ModuleProfile(
            name, type(module).__name__, parameters=held[0], parameter_bytes=held[1], **sums[name]
        )
    return found


def _unused(tape: Tape, composites: Mapping[str, Composite]) -> Iterator[tuple[str, int, int]]:
    """Module, operations, and those that run again, of what runs and nothing depends on: it goes forward only."""
    for node, again in tape.unused:
        forward = round(forward_flops(node, tape.values, composites))
        if forward:
            yield node.module, forward, forward * again


def _within(module: str) -> list[str]:
    """A module and all that it is in, the model itself first."""
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _folded(rows: Mapping[str, ModuleProfile], merged: Quotient) -> list[ModuleProfile]:
    """One row for each module of the first copy, the sum of those in its place in the others."""
    first: dict[str, str] = {}
    for group in merged.groups:
        first.update(dict.fromkeys(group, group[0]))
    found: dict[str, ModuleProfile] = {}
    for name, row in rows.items():
        # a copy inside of a copy is folded twice: from the outermost in
        folded = ""
        for part in name.split(".") if name else ():
            folded = f"{folded}.{part}" if folded else part
            folded = first.get(folded, folded)
        known = found.get(folded)
        found[folded] = row if known is None else _sum(known, row)
    return list(found.values())


def _sum(one: ModuleProfile, other: ModuleProfile) -> ModuleProfile:
    return replace(
        one,
        copies=one.copies + other.copies,
        forward_flops=one.forward_flops + other.forward_flops,
        backward_flops=one.backward_flops + other.backward_flops,
        again_flops=one.again_flops + other.again_flops,
        parameters=one.parameters + other.parameters,
        parameter_bytes=one.parameter_bytes + other.parameter_bytes,
        saved_bytes=one.saved_bytes + other.saved_bytes,
    )


def _cells(row: ModuleProfile) -> tuple[str, ...]:
    depth = row.name.count(".") + 1 if row.name else 0
    flops = (row.forward_flops, row.backward_flops, row.again_flops)
    return (
        "  " * depth + (row.name.rpartition(".")[2] or "(model)"),
        row.kind,
        str(row.copies),
        f"{row.parameters:,}",
        human_bytes(row.parameter_bytes),
        *(_human_flops(count) for count in flops),
        human_bytes(row.saved_bytes),
    )


def _placed(cell: str, column: int, width: int) -> str:
    """Names to the left, figures to the right."""
    return cell.ljust(width) if column < 2 else cell.rjust(width)


def _human_flops(count: int) -> str:
    """ "1.5 TFLOP" of 1.5e12; "-" of none."""
    if not count:
        return "-"
    power = min(int(math.log10(count) // 3), 6)
    return f"{count / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}FLOP"
