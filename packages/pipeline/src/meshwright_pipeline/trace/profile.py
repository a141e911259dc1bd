"""The record of one profiled run: which units ran, what they returned, and what later code used of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from meshwright_dtensor.sharding.boxes import dim_order_of, has_gaps, strides_of
from meshwright_pipeline.module_state import Place
from meshwright_pipeline.pytrees import leaves_of
from meshwright_pipeline.trace.side_outputs import Entry, is_attribute
from meshwright_pipeline.trace.state.state_writes import NO_WRITES, WrittenState

Key = tuple[str, int]
"""A call of a unit: (name of the unit, index of this call in the forward)."""

Label = tuple[str, int, str, int]
"""A tensor that a unit returned: (unit, call, path of a submodule or "", index of the leaf)."""

Labels = frozenset[Label]
NO_LABELS: Labels = frozenset()

BETWEEN: Key = ("", 0)
"""The key of operations that run between units."""

PARAMETERS = -1
"""The call index of a label that stands for the parameters of a unit."""

FillOp = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""A random in-place operation, its positional arguments after the tensor, and its keyword arguments."""


@dataclass(frozen=True)
class Draw:
    """One random operation of the model.

    Attributes:
        key: the unit call that ran it.
        place: its index among the random operations of that call.
        op: the in-place operation that draws the numbers.
        shape, stride, dtype: of the tensor that it fills.
        rest, kwargs: the other arguments of `op`.
    """

    key: Key
    place: int
    op: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rest: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> tuple[Key, int]:
        """Identifies the operation within one forward."""
        return self.key, self.place

    def run(
        self,
        device: torch.device,
        numel: int | None = None,
        fill: FillOp | None = None,
        like: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw from the default generator of `device`.

        `numel`: this many elements, to advance the generator only; None for the whole tensor.

        `fill`: the operation with its present arguments, when they may differ from the recorded ones (a dropout whose probability
        has changed). `like`: rows of the tensor, whose memory order the numbers have.
        """
        op, rest, kwargs = fill or (self.op, self.rest, self.kwargs)
        if numel is not None:
            target = torch.empty(numel, dtype=self.dtype, device=device)
        else:
            # zeros that stood for values when the model was profiled had no memory order
            strides = self.stride
            if like is not None and like.dim() == len(self.shape):
                strides = strides_of(self.shape, dim_order_of(like), has_gaps(like, self.shape))
            dtype = self.dtype if like is None else like.dtype
            target = torch.empty_strided(self.shape, strides, dtype=dtype, device=device)
        with torch.no_grad():
            op(target, *rest, **dict(kwargs))
        return target


@dataclass(frozen=True)
class Result:
    """The result of a unit call, with zeros in place of values.

    Attributes:
        output: what forward returned.
        side: outputs seen by hooks of submodules, by path, and tensors left in attributes (see side_outputs).
        grown: the places in `side` where the unit only added to an existing container.
        kept: the buffers and attributes that it writes.
        put: the paths in `side` of its entries in lists, dicts and objects of its arguments, and where they are.
        plain: the attributes without tensors that it stores (see plain_attributes).
        read: the tensors that it reads without having or getting them (global ones, say).
    """

    output: Any
    side: dict[str, Any] = field(default_factory=dict)
    grown: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    put: dict[str, Entry] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    read: tuple[torch.Tensor, ...] = ()

    @property
    def inside(self) -> dict[str, Any]:
        """Those of `side` that are in the unit."""
        return {path: value for path, value in self.side.items() if path not in self.put}


@dataclass(frozen=True)
class Profile:
    """One profiled run.

    Attributes:
        order: the unit calls, in the order in which they ran.
        consumes: unit call -> the labels that its arguments depend on.
        final: the labels that the result of the model, or a buffer written outside of units, depends on.
        results: unit call -> its result.
        output: what the model returned; the values of its tensors mean nothing.
        read: units whose parameters are used by code between units.
        draws: the random operations, in order.
        of_batch: the unit calls that depend on the rows of the batch.
        written: unit results that code between units writes to in place.
        kept: buffers and numbers outside of units that the forward writes.
        reads: code between units uses parameters of units, be it for nothing that is needed.
        left: where the forward leaves tensors of the batch or of units outside of units, but in buffers -> one of its tensors.
        plain_reads: (unit, path) of the plain attributes that code outside of the unit reads.
    """

    order: tuple[Key, ...]
    consumes: dict[Key, Labels]
    final: Labels
    results: dict[Key, Result]
    output: Any
    read: tuple[str, ...]
    draws: tuple[Draw, ...] = ()
    of_batch: frozenset[Key] = frozenset()
    written: Labels = NO_LABELS
    kept: WrittenState = NO_WRITES
    reads: bool = False
    left: Mapping[Place, torch.Tensor] = field(default_factory=dict)
    plain_reads: frozenset[tuple[str, str]] = frozenset()

    @cached_property
    def attributes(self) -> frozenset[tuple[str, int, str]]:
        """(unit, call, place) of the unit attributes that code between units reads."""
        labels = self.final.union(*self.consumes.values())
        return frozenset(label[:3] for label in labels if is_attribute(label[2]))

    @cached_property
    def left_anywhere(self) -> dict[Place, torch.Tensor]:
        """The same as `left`, with the attributes of units that hold tensors of their calls."""
        left = dict(self.left)
        for (unit, _), result in self.results.items():
            for path, value in result.side.items():
                if is_attribute(path):
                    part, _, name = path.partition(":")
                    left[".".join(filter(None, (unit, part))), name] = next(
                        leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)
                    )
        return left

    @cached_property
    def keeping(self) -> dict[str, frozenset[str]]:
        """Unit -> the tensors that its calls write, which other calls may read; "" -> those of the model around units."""
        around = frozenset(".".join(filter(None, at)) for at in self.kept.buffers)
        units = {unit: result.kept for (unit, _), result in self.results.items() if result.kept}
        return units | ({"": around} if around else {})

    def plain(self, key: Key) -> dict[str, Any]:
        """The plain attributes that a unit call stores and code outside reads."""
        return {
            at: value for at, value in self.results[key].plain.items() if (key[0], at) in self.plain_reads
        }

    def leaf(self, label: Label) -> Any:
        """The leaf of a result that a label stands for."""
        unit, call, path, index = label
        result = self.results[unit, call]
        return leaves_of(result.side[path] if path else result.output)[index]
