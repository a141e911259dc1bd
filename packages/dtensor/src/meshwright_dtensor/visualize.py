"""`visualize`: a tensor or a model as a picture for a terminal and a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.mesh.layout_picture import layout_html, layout_text
from meshwright_dtensor.model.stage_info import StageInfo, stages_of
from meshwright_dtensor.sharding.states import format_state
from meshwright_dtensor.stages.stage_tensor import StageTensor
from meshwright_dtensor.stored.gather import stored_layout
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.utils.console import as_text, full_width, table_of
from meshwright_dtensor.utils.html import table_html
from meshwright_dtensor.utils.names import count_of, number_ranges

COLUMNS = ("parameter", "copies", "shape", "dtype", "placement", "on this rank")


@dataclass(frozen=True)
class Picture:
    """A picture as text, which `print` shows, and as HTML, which a notebook shows."""

    text: str
    html: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def visualize(value: torch.Tensor | nn.Module | Layout) -> Picture:
    """Show which rank holds which part of a tensor, or where the parameters of a model are.

    It reads no values and does not communicate: call it on one rank or on all.

    Args:
        value: a global tensor, a DTensor or a parameter of a parallel model; a Layout; a plain tensor, which every rank holds
            whole; or a model, parallel or not.

    Returns:
        A picture: `print` it, or end a notebook cell with it.

    Raises:
        UsageError: `value` is none of these.
    """
    if isinstance(value, nn.Module):
        return _model(value)
    layout = value if isinstance(value, Layout) else None
    if isinstance(value, StageTensor):
        text = f"{_shape(value)} {_dtype(value)}: held by rank {number_ranges(value.holders)} of pp"
        return Picture(f"{text}\n", f"<p>{text}</p>")
    if isinstance(value, torch.Tensor):
        layout = _layout_of(value)
        if layout is None:
            text = f"{_shape(value)} {_dtype(value)}: a plain tensor, whole on every rank"
            return Picture(f"{text}\n", f"<p>{text}</p>")
    if layout is None:
        raise UsageError(
            f"visualize() was given a {type(value).__name__}; give a tensor, a torch.nn.Module or a Layout"
        )
    return Picture(layout_text(layout), layout_html(layout))


def _layout_of(tensor: torch.Tensor) -> Layout | None:
    """The layout of a distributed tensor; None of a plain one."""
    if isinstance(tensor, GlobalTensor):
        return tensor.global_layout
    return stored_layout(tensor) if isinstance(tensor, DTensor) else None


def _model(model: nn.Module) -> Picture:
    """A table of the parameters. Numbered modules whose parameters are alike are one row."""
    rows: dict[tuple[str, ...], int] = {}
    for cells in _parameters(model):
        rows[cells] = rows.get(cells, 0) + 1
    table = [(cells[0], copies, *cells[1:]) for cells, copies in rows.items()]
    title = f"{type(model).__name__}: {count_of(sum(rows.values()), 'parameter')}"
    plan = getattr(model, "parallel_plan", None)
    title += f", {plan}" if plan is not None else ", not parallel"
    text = table_of(COLUMNS, table, right=("copies",))
    return Picture(
        as_text([title, text], max(110, full_width(text))),
        table_html(COLUMNS, table, title=title, right=("copies",)),
    )


def _parameters(model: nn.Module) -> Iterator[tuple[str, ...]]:
    stages = stages_of(model)
    for name, parameter in model.named_parameters():
        # the outermost number is that of the block
        pattern = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name, count=1)
        if stages is not None and stages.rank not in (ranks := _holders(stages, name)):
            where = f"nothing: on rank {number_ranges(ranks)} of pp"
            yield pattern, _shape(parameter), _dtype(parameter), "", where
            continue
        layout = _layout_of(parameter)
        if layout is None:
            yield pattern, _shape(parameter), _dtype(parameter), "whole", _shape(parameter)
            continue
        states = zip(layout.context.axes, layout.states, strict=True)
        sharded = ", ".join(
            f"{axis} {format_state(state)}" for axis, state in states if state not in ("I", "X")
        )
        here = str(list(layout.local_shape))
        yield pattern, str(list(layout.shape)), _dtype(parameter), sharded or "whole", here


def _holders(stages: StageInfo, name: str) -> set[int]:
    """The ranks along pp that hold a parameter, under this name or under one that is tied to it."""
    tied = [other for other, first in stages.aliases.items() if first == name]
    return {rank for each in (name, *tied) for rank in stages.holders.get(each, ())}


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
