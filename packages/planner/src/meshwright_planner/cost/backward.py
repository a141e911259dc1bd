"""Bytes that the backward pass of a memory-bound operation reads and writes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright_dtensor.trace.graph import Ref
from meshwright_planner.trace.op_kinds import VIEWS, base_name
from meshwright_planner.trace.tape import Saved, Tape

PASSED_ON = frozenset("add sub clone alias".split())
"""Operations that pass a gradient on unchanged, except to broadcast inputs."""

CUT = frozenset("slice select narrow diagonal as_strided unfold".split())
"""Views of a part: the gradient of the whole is filled with zeros, then that of the part is copied into it."""

CUT_UP = frozenset("split split_with_sizes unbind chunk".split())
"""Views of all parts: their gradients are joined."""


@dataclass(frozen=True)
class BackwardTraffic:
    """How often the backward pass of an operation reads or writes each of its tensors, or a gradient of that size.

    Args:
        ins, outs: counts per input and output.
        kept: bytes of saved tensors that the recorder never saw.
        sums: of the counts per input, those that add the gradient to that of another reader.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    kept: float = 0.0
    sums: tuple[int, ...] = ()

    def around_products(self, biased: bool) -> BackwardTraffic:
        """The traffic of the backward pass of products besides the products themselves: the sums, and where a bias gets a gradient
        (`biased`), another pass over that of the outputs, which is summed.
        """
        return BackwardTraffic(self.sums, (int(biased),) * len(self.outs), sums=self.sums)


class BackwardTraffics:
    """The backward traffic of the nodes of a tape, and of tapes that differ from it in sizes only.

    Gradients of outputs and saved tensors are read, gradients of inputs are written.  Gradients of a value with several readers
    are summed: two reads and a write for each reader after the first.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._read: dict[int, set[int]] = defaultdict(set)
        self._inner: dict[int, list[int]] = defaultdict(list)
        for place, item in enumerate([*tape.saved, *tape.dropped]):
            if item.root is None:
                self._inner[item.by].append(place)
            elif item.value is not None:
                self._read[item.by].add(item.value)
        # value -> the first node from which it receives a gradient
        self._first: dict[int, int] = {}
        for index, node in enumerate(tape.nodes):
            for ref, flows in zip(node.ins, tape.flows[index], strict=True):
                if flows:
                    self._first.setdefault(ref.i, index)

    def of(self, tape: Tape, index: int) -> BackwardTraffic:
        """The backward traffic of a node; `tape`: gives the sizes."""
        node, read, flows = tape.nodes[index], self._read[index], tape.flows[index]
        whole = math.prod(tape.values[node.outs[0].i].shape) if node.outs else 0
        made = [tape.grad[ref.i] for ref in node.outs]
        written = list(flows)
        if base_name(node) in PASSED_ON:
            sizes = (math.prod(tape.values[ref.i].shape) for ref in node.ins)
            written = [receives and size != whole for receives, size in zip(written, sizes, strict=True)]
        runs = any(written)
        added = [w and self._first.get(ref.i, index) != index for w, ref in zip(flows, node.ins, strict=True)]
        sums = tuple(3 * more for more in added)
        if node.op is not None and base_name(node) in VIEWS:
            ins, outs = _of_view(base_name(node), any(flows), whole != _elements(tape, node.ins))
            by_input = (ins * w + more for w, more in zip(flows, sums, strict=True))
            return BackwardTraffic(tuple(by_input), tuple(outs * m for m in made), sums=sums)
        by_input = (w + (ref.i in read) + more for w, more, ref in zip(written, sums, node.ins, strict=True))
        return BackwardTraffic(
            tuple(by_input),
            tuple((m and runs) + (ref.i in read) for m, ref in zip(made, node.outs, strict=True)),
            float(sum(_item(tape, place).nbytes for place in self._inner[index])),
            sums,
        )


def _of_view(name: str, flows: bool, resized: bool) -> tuple[int, int]:
    """How often the backward pass of a view passes over the gradient of its input, and over those of its outputs."""
    if not flows:
        return 0, 0
    if name in CUT:
        return 1, 2
    # an expanded gradient is summed
    return (1, 1) if name in CUT_UP or (name == "expand" and resized) else (0, 0)


def _elements(tape: Tape, refs: Sequence[Ref]) -> int:
    """Elements of the first of these values."""
    return math.prod(tape.values[refs[0].i].shape) if refs else 0


def _item(tape: Tape, place: int) -> Saved:
    """The item at a place of `tape.saved` followed by `tape.dropped`."""
    return tape.saved[place] if place < len(tape.saved) else tape.dropped[place - len(tape.saved)]
