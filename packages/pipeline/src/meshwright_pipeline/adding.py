"""Which numbers of a model's result follow from those of microbatches, so that backwards may begin before all forwards have ended.

The code between units is watched twice, on a microbatch and on the batch (see watching). What a rule proves adds up;
for all else the code behind the units runs once on the whole batch (see tail).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_pipeline.batching import Call, microbatches, rows_of
from meshwright_pipeline.counting import Place
from meshwright_pipeline.losses import loss_of
from meshwright_pipeline.profiling import Profile, Profiler
from meshwright_pipeline.rowwise import along
from meshwright_pipeline.trees import leaves_of, unlike_dims
from meshwright_pipeline.watching import Watch, sketch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Leaf:
    """How one leaf of a result follows from those of `count` microbatches.

    Attributes:
        rows: the dim along which they lie one after the other.
        power: it is count ** (power - 1) times their sum: 0 for means, 1 for sums.

    With neither, it is the same in all.
    """

    rows: int | None = None
    power: int | None = None

    def weight(self, count: int) -> float:
        """What a number of one microbatch counts."""
        return 1.0 if self.power is None else float(count) ** (self.power - 1)

    def join(self, parts: Sequence[Any]) -> Any:
        """The leaf for the whole batch."""
        if self.rows is not None:
            return torch.cat(list(parts), self.rows)
        if self.power is None or len(parts) == 1:
            return parts[-1]
        return (sum(parts) * self.weight(len(parts))).to(parts[0].dtype)


@dataclass(frozen=True)
class Adding:
    """A result that adds up.

    Attributes:
        loss: how the loss does.
        leaves: how each leaf does; None for one of which that is not proven.
        averaging: how many losses average over targets that count.
        fixed: where numbers that inputs alone decide are asked for.
    """

    loss: Leaf
    leaves: tuple[Leaf | None, ...]
    averaging: int = 0
    fixed: tuple[Place, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every leaf is known."""
        return None not in self.leaves


def of_one(result: Any) -> Adding:
    """Where there is one microbatch."""
    return Adding(Leaf(), tuple(Leaf() for _ in leaves_of(result)))


def find(profiler: Profiler, entire: Profile, whole: Call, count: int) -> Adding | None:
    """How the loss of a batch follows from those of its microbatches; None where that is not proven.

    Args:
        profiler: of the skeleton.
        entire: what it has found of the batch.
        whole: the batch, with ordinary tensors; its rows can be shared by the microbatches.
        count: of microbatches, two at least.
    """
    try:
        part, rows = microbatches(*whole, count)[0], rows_of(*whole)
        assert rows is not None  # else it would not have been cut
        first = Watch(rows // count, entire)
        few = profiler.run(*part, watch=first)
        second = Watch(rows, few, first)
        last = profiler.run(*whole, watch=second)
    except Exception:  # whatever code does that meets other numbers of rows than it expects
        return None
    if len(first.tape) != len(second.tape) or first.calls != second.calls:
        return None
    loss = loss_of(last.output)
    befores, leaves = leaves_of(few.output), leaves_of(last.output)
    if loss is None or len(befores) != len(leaves):
        return None
    of_loss = _leaf(loss, loss_of(few.output), second)
    if of_loss is None or of_loss.rows is not None:
        return None
    if of_loss.power is None:  # the same in all microbatches: their mean
        of_loss = Leaf(power=0)
    found = tuple(_leaf(leaf, before, second) for leaf, before in zip(leaves, befores, strict=True))
    return Adding(of_loss, found, second.averaging, tuple(second.fixed))


def _leaf(leaf: Any, before: Any, watch: Watch) -> Leaf | None:
    if not isinstance(leaf, Tensor) or not isinstance(before, Tensor):
        return Leaf() if type(leaf) is type(before) and sketch(leaf) == sketch(before) else None
    kind = watch.kind(leaf)
    if kind is None:
        return Leaf() if sketch(leaf) == sketch(before) else None
    if kind.rows is None:
        if kind.power is None or leaf.dim():
            return None
        return Leaf(power=kind.power) if kind.live else Leaf()
    grown = unlike_dims(leaf, before)
    if len(grown) != 1:
        return None
    rest = [dim for dim in range(leaf.dim()) if dim != grown[0]]
    rows = along(kind.rows, rest)
    order = torch.arange(watch.rows).repeat_interleave(leaf.shape[grown[0]] // watch.rows)
    return Leaf(rows=grown[0]) if rows is not None and torch.equal(rows.flatten().long(), order) else None
