"""Bytes that the backward pass of a memory-bound operation reads and writes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from meshwright_planner.trace.op_kinds import base_name
from meshwright_planner.trace.tape import Saved, Tape

PASSED_ON = frozenset("add sub clone alias".split())
"""Operations that pass a gradient on unchanged, except to broadcast inputs."""


@dataclass(frozen=True)
class BackwardTraffic:
    """How often the backward pass of an operation reads or writes each of its tensors, or a gradient of that size.

    Args:
        ins, outs: counts per input and output.
        kept: bytes of saved tensors that the recorder never saw.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    kept: float = 0.0


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
        ins = zip(written, added, node.ins, strict=True)
        return BackwardTraffic(
            tuple(w + (ref.i in read) + 3 * more for w, more, ref in ins),
            tuple((m and runs) + (ref.i in read) for m, ref in zip(made, node.outs, strict=True)),
            float(sum(_item(tape, place).nbytes for place in self._inner[index])),
        )


def _item(tape: Tape, place: int) -> Saved:
    """The item at a place of `tape.saved` followed by `tape.dropped`."""
    return tape.saved[place] if place < len(tape.saved) else tape.dropped[place - len(tape.saved)]
