"""What lies whole may be cut for nothing: looked at where a call would otherwise move data.

The policy of :mod:`choose` goes forward and cuts nothing up that lies whole, which is right for most calls.  A recurrent cell
starts from zeros that every rank has, computes with them first, and writes to what comes out: all of the batch would be
gathered to meet them.  Constants, and values whose gradients are partial (X), are cut at no cost in either pass.


What follows from the states of a call's ops: whether all conversions can be made before it, and whether writes arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from meshwright_dtensor.propagate.choose import Choice, Chooser, Underivable, conversion_cost
from meshwright_dtensor.sharding.states import I, State, States, X
from meshwright_dtensor.trace.graph import Node, Ref

TRIED = 8
"""Ways to cut that are looked at: a constant may have several dims of the size of what is sharded."""

_BYTE = 1.0


def choose_with_rewrites(
    chooser: Chooser,
    inputs: Mapping[int, States],
    weights: Collection[int],
    outputs: Sequence[State | None] = (),
) -> Choice:
    """As `Chooser.run`, with inputs that can be cut for nothing cut where less is moved then.

    Raises:
        Underivable: no legal rows, cut or not.
    """
    best: Choice | None = None
    cost, failed = float("inf"), None
    try:
        best = chooser.run(inputs, weights, outputs)
        cost = _moved(chooser, best, inputs, weights)
    except Underivable as error:
        failed = error
    if cost >= _BYTE:
        for other in _cuts(chooser, inputs, weights):
            try:
                choice = chooser.run(other, weights, outputs)
            except Underivable:
                continue
            less = _moved(chooser, choice, inputs, weights)
            if less < cost:
                best, cost = choice, less
    if best is None:
        assert failed is not None
        raise failed
    return best


def _cuts(
    chooser: Chooser, inputs: Mapping[int, States], weights: Collection[int]
) -> Iterator[dict[int, States]]:
    """The inputs with all that can be cut for nothing cut, where a dim is as long as one that another input is sharded on."""
    values, written = chooser.values, _written(chooser)
    ways: list[list[tuple[int, int, int]]] = []  # per input and axis: (input, axis, dim)
    for axis in range(chooser.context.ndim):
        spread = [(i, s[axis]) for i, s in inputs.items() if i not in weights and isinstance(s[axis], int)]
        lengths = {values[i].shape[int(dim)] for i, dim in spread}
        for i, states in inputs.items():
            free = states[axis] == X or (states[axis] == I and i in chooser.constants)
            if free and i not in weights and i not in written:
                dims = [d for d, size in enumerate(values[i].shape) if size in lengths]
                if dims:
                    ways.append([(i, axis, dim) for dim in dims])
    if not ways:
        return
    for cut in itertools.islice(itertools.product(*ways), TRIED):
        changed = dict(inputs)
        for i, axis, dim in cut:
            changed[i] = (*changed[i][:axis], dim, *changed[i][axis + 1 :])
        yield changed


def _written(chooser: Chooser) -> set[int]:
    """Values that the call writes to, or to views of which it does: a part that was cut out is no longer they."""
    root: dict[int, int] = {}
    found = set()
    for node in chooser.nodes:
        if node.ins:
            base = root.get(node.ins[0].i, node.ins[0].i)
            if node.mutates:
                found.add(base)
            if is_view(node):
                root.update((ref.i, base) for ref in node.outs)
    return found


def _moved(chooser: Chooser, choice: Choice, inputs: Mapping[int, States], weights: Collection[int]) -> float:
    """Bytes on the wire, forward and backward, of all conversions of a choice; each is made once."""
    states: dict[int, States] = dict(inputs)
    whole = (I,) * chooser.context.ndim
    seen: set[tuple[int, States]] = set()
    total = 0.0
    for node, ins, outs in zip(chooser.nodes, choice.ins, choice.outs, strict=True):
        for ref, wanted in zip(node.ins, ins, strict=True):
            if (ref.i, wanted) in seen:
                continue
            seen.add((ref.i, wanted))
            heavy = ref.i in weights
            value = chooser.values[ref.i]
            grad = value.differentiable and ref.i not in chooser.constants
            for a, b, n in zip(states.get(ref.i, whole), wanted, chooser.context.sizes, strict=True):
                cost = 0.0 if n == 1 else conversion_cost(a, b, value.nbytes, n, heavy, grad)
                total += float("inf") if cost is None else cost
        states.update((ref.i, made) for ref, made in zip(node.outs, outs, strict=True))
    return total


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


def check_writes(
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
