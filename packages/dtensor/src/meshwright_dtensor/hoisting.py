"""What follows from the states of a call's ops: whether all conversions can be made before it, and whether writes arrive."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshwright_dtensor.choose import Choice, Underivable
from meshwright_dtensor.states import States
from meshwright_dtensor.trace import Node, Ref


def hoist(
    nodes: Sequence[Node], results: Sequence[Ref], choice: Choice, start: Mapping[int, States]
) -> tuple[dict[int, States], dict[int, States], bool]:
    """States of every value as produced; what the inputs become if all conversions are done up front; whether they can.

    `start`: value -> its states, of the inputs.
    """
    produced: dict[int, States] = dict(start)
    wanted: dict[int, States] = {}
    possible = True
    for node, ins, outs in zip(nodes, choice.ins, choice.outs, strict=True):
        for ref, states in zip(node.ins, ins, strict=True):
            if ref.i in start:
                possible &= wanted.setdefault(ref.i, states) == states
            elif ref.i in produced:
                possible &= produced[ref.i] == states
        for ref, states in zip(node.outs, outs, strict=True):
            produced[ref.i] = states
    for ref in results:
        if ref.i in start:
            possible &= wanted.setdefault(ref.i, produced[ref.i]) == produced[ref.i]
    return produced, {i: wanted.get(i, s) for i, s in start.items()}, possible


def check_mutations(
    nodes: Sequence[Node],
    results: Sequence[Ref],
    choice: Choice,
    start: Mapping[int, States],
    copies: Collection[int] = (),
) -> bool:
    """Refuse a write through a view that was moved; tell whether an output is a view that was moved.

    Inputs in ``copies`` are such views already, and so are views of them.

    Raises:
        Underivable: the write would not reach the tensor it is meant for.
    """
    root: dict[int, int] = {i: i for i in start}
    moved: dict[int, bool] = {i: i in copies for i in start}
    current: dict[int, States] = dict(start)
    for node, ins, outs in zip(nodes, choice.ins, choice.outs, strict=True):
        if node.ins and (is_view(node) or node.mutates):
            i = node.ins[0].i
            shifted = moved.get(i, False) or (
                i in current and current[i] != ins[0] and not _same_values(current[i], ins[0])
            )
            if node.mutates and i in root and shifted:
                raise Underivable("writes through a view that had to be moved")
            if i in root:
                for ref in node.outs:
                    root[ref.i], moved[ref.i] = root[i], shifted
        current.update({r.i: s for r, s in zip(node.outs, outs, strict=True)})
    return any(moved.get(r.i, False) for r in results if r.i in root)


def is_view(node: Node) -> bool:
    """Whether results of an op may share memory with its first input."""
    return node.op is not None and any(r.alias_info is not None for r in node.op._schema.returns)


def _same_values(a: States, b: States) -> bool:
    return all(x == y or {x, y} == {"I", "X"} for x, y in zip(a, b, strict=True))
