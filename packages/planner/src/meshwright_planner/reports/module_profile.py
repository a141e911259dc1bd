"""`profile_model`: FLOPs, parameters and saved activations of each module of a model, on one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy.plan_request import PRECISIONS, unknown
from meshwright_dtensor.trace.graph import Node
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.html import table_html
from meshwright_dtensor.utils.process import without_garbage_collection
from meshwright_planner.recompute.region import Region
from meshwright_planner.recompute.rules import recompute_rules
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.flops import backward_flops, by_name, forward_flops
from meshwright_planner.trace.quotient import Quotient, quotient
from meshwright_planner.trace.recorder.record import record
from meshwright_planner.trace.tape import Saved, Tape

COLUMNS = ("module", "class", "copies", "parameters", "bytes", "forward", "backward", "again", "kept")
"""Titles of the table of a profile."""


@dataclass(frozen=True)
class ModuleProfile:
    """One module with its submodules, or all copies of a block together.

    Args:
        name: its full name, "" for the model itself; for copies the name of the first.
        kind: its class.
        copies: the number of modules in this row.
        forward_flops, backward_flops: floating-point operations of products, convolutions and attention.
        again_flops: operations of the forward pass that the backward pass recomputes.
        parameters, parameter_bytes: number and bytes of distinct parameters, in their own dtype.
        saved_bytes: bytes that autograd keeps for the backward pass, without parameters; a storage counts where it is saved first.
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
    """The profile of a model with one batch on one device. `print` it for a table.

    Args:
        modules: every module, the model first, in the model's order.
        blocks: the same with repeated blocks folded: a row stands for all copies, and is their sum.
        precision, recompute: as given to `profile_model`.
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
        row = next((row for row in self.modules if row.name == name), None)
        if row is None:
            raise UsageError(unknown("module", name, [row.name for row in self.modules]))
        return row

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
        lines = [COLUMNS, *(_cells(row) for row in self.blocks)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        # names are aligned to the left, figures to the right
        form = "  ".join(f"{{:{'<' if n < 2 else '>'}{width}}}" for n, width in enumerate(widths))
        return "\n".join(form.format(*line).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return table_html(COLUMNS, map(_cells, self.blocks), right=COLUMNS[2:])


def profile_model(
    model: nn.Module, batch: Any, *, precision: str | None = None, recompute: str | None = None
) -> ModelProfile:
    """Run `model` once on fake tensors, and profile its modules. The model is left untouched.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example batch: a dict of keyword arguments, a tuple of arguments, or a tensor.
        precision: "bf16", "fp16" or "fp32": what a float32 model is computed in; None is its own dtype.
        recompute: "full", "alternate" or "selective" for every repeated block, or a pattern of module names, as in `plan`;
            None keeps everything.

    Raises:
        UsageError: an option is not possible, or the model does not accept the batch.
        UnsupportedError: the model depends on the data of its batch, and is too large for a real run.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(unknown("precision", precision, PRECISIONS))
    if recompute is not None and (not isinstance(recompute, str) or not recompute):
        text = f"recompute={recompute!r} is neither a policy nor a pattern of module names; give a string"
        raise UsageError(text)
    rules, example = recompute_rules(model, recompute), Batch.of(batch)
    book = RuleBook.default()
    dtype = None if precision in (None, "fp32") else DTYPES[str(precision)]
    with without_garbage_collection():
        tape = record(model, example, book.composites, dtype)
        merged = quotient(tape)
    rules = recompute_rules(model, recompute, tape.calls)
    composites = by_name(book.composites)
    forward = [forward_flops(node, tape.values, composites) for node in tape.nodes]
    region = Region(tape, merged, forward.__getitem__, rules)
    saved = region.saved(tape) if rules else tape.saved
    # operations whose results are unused have no backward
    work = [(n, forward_flops(n, tape.values, composites), 0.0, again) for n, again in tape.unused]
    for k, (node, flops) in enumerate(zip(tape.nodes, forward, strict=True)):
        back = backward_flops(node, tape.values, tape.flows[k], flops)
        work.append((node, flops, back, tape.again[k] + (k in region.repeated)))
    rows = _rows(model, tape, work, saved)
    return ModelProfile(tuple(rows.values()), tuple(_folded(rows, merged)), precision, recompute)


def _rows(
    model: nn.Module, tape: Tape, work: Iterable[tuple[Node, float, float, int]], saved: Iterable[Saved]
) -> dict[str, ModuleProfile]:
    """Module -> its profile, the model first. `work`: operations, FLOPs forward and backward, and how often they run again."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in tape.modules}
    for node, forward, back, again in work:
        for name in _within(node.module):
            sums[name]["forward_flops"] += round(forward)
            sums[name]["backward_flops"] += round(back)
            sums[name]["again_flops"] += round(forward) * again
    seen: set[int] = set()
    for item in saved:
        if item.root is not None:
            if item.root in seen or (tape.values[item.root].name or "").startswith("param:"):
                continue
            seen.add(item.root)
        for name in _within(tape.nodes[item.by].module):
            sums[name]["saved_bytes"] += item.nbytes
    for name, module in model.named_modules():
        for parameter in module.parameters():
            sums[name]["parameters"] += parameter.numel()
            sums[name]["parameter_bytes"] += parameter.numel() * parameter.element_size()
    return {n: ModuleProfile(n, type(module).__name__, **sums[n]) for n, module in model.named_modules()}


def _within(module: str) -> list[str]:
    """The names of a module and of all modules around it, the model first."""
    return ["", *accumulate(module.split("."), "{}.{}".format)] if module else [""]


def _folded(rows: Mapping[str, ModuleProfile], merged: Quotient) -> list[ModuleProfile]:
    """One row for each module of the first copy of a block: the sum over all copies."""
    first: dict[str, str] = {}
    for group in merged.groups:
        first.update(dict.fromkeys(group, group[0]))
    sums: dict[str, ModuleProfile] = {}
    for name, row in rows.items():
        # a copy inside a copy is folded twice, the outer one first
        folded = ""
        for part in name.split(".") if name else ():
            folded = f"{folded}.{part}" if folded else part
            folded = first.get(folded, folded)
        same = sums.setdefault(folded, row)
        if same is not row:
            figures = {name: value for name, value in asdict(row).items() if isinstance(value, int)}
            sums[folded] = replace(same, **{n: getattr(same, n) + value for n, value in figures.items()})
    return list(sums.values())


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


def _human_flops(count: int) -> str:
    """ "1.5 TFLOP" of 1.5e12; "-" of none."""
    if not count:
        return "-"
    power = min(int(math.log10(count) // 3), 6)
    return f"{count / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}FLOP"
