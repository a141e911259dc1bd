"""What the backward pass of an operation that streams reads and writes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from meshwright_planner.trace.op_kinds import base_name
from meshwright_planner.trace.tape import Saved, Tape

PASSED_ON = frozenset("add sub clone alias".split())
"""Operations that hand a gradient on as it is, but for inputs that were broadcast."""


@dataclass(frozen=True)
class Back:
    """How often the backward pass of an operation reads or writes each of its tensors, or one as large.

    Args:
        ins, outs: per input and output.
        kept: bytes of what it keeps that the recorder never saw.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    kept: float = 0.0


class Backwards:
    """Those of the nodes of a tape, and of tapes that differ from it in sizes only.

    Gradients of outputs are read, what is kept is read, and gradients of inputs are written.  A gradient that several readers
    of a value make is added up: two reads and a write by each of them beyond the first.
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
        self._first: dict[int, int] = {}  # value -> the first node that hands a gradient back to it
        for index, node in enumerate(tape.nodes):
            for ref, flows in zip(node.ins, tape.flows[index], strict=True):
                if flows:
                    self._first.setdefault(ref.i, index)

    def of(self, tape: Tape, index: int) -> Back:
        """That of a node; `tape`: whose sizes are asked for."""
        node, read, flows = tape.nodes[index], self._read[index], tape.flows[index]
        whole = math.prod(tape.values[node.outs[0].i].shape) if node.outs else 0
        made = [tape.grad[ref.i] for ref in node.outs]
        written = list(flows)
        if base_name(node) in PASSED_ON:
            sizes = (math.prod(tape.values[ref.i].shape) for ref in node.ins)
            written = [asked and size != whole for asked, size in zip(written, sizes, strict=True)]
        looked = any(written)
        added = [w and self._first.get(ref.i, index) != index for w, ref in zip(flows, node.ins, strict=True)]
        return Back(
            tuple(
                w + (ref.i in read) + 3 * more for w, more, ref in zip(written, added, node.ins, strict=True)
            ),
            tuple((m and looked) + (ref.i in read) for m, ref in zip(made, node.outs, strict=True)),
            float(sum(_item(tape, place).nbytes for place in self._inner[index])),
        )


def _item(tape: Tape, place: int) -> Saved:
    """That of `tape.saved`, and behind those of `tape.dropped`."""
    return tape.saved[place] if place < len(tape.saved) else tape.dropped[place - len(tape.saved)]
