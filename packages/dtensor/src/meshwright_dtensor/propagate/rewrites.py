"""Rewrites of a choice of states: shard replicated inputs, hoist conversions before the call, check in-place writes; tiers.

The policy of :mod:`choose` does not shard replicated values, which is right for most calls.  A recurrent cell starts from
replicated zeros, computes with them first and writes to the result, so the whole batch would be gathered.  Constants, and
values whose gradients are partial (X), are sharded at no cost in either pass; that is tried where a call would move data.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from meshwright_dtensor.propagate.choose import Choice, Chooser, Underivable, conversion_cost, is_view
from meshwright_dtensor.sharding.states import I, P, State, States, X, forward_kind
from meshwright_dtensor.trace.graph import Node, Ref

MAX_TRIALS = 8
"""Shardings that are tried: a constant may have several dims of the size of the sharded dim."""

_BYTE = 1.0


def choose_with_rewrites(
    chooser: Chooser, inputs: Mapping[int, States], outputs: Sequence[State | None] = ()
) -> Choice:
    """As `Chooser.run`, with replicated inputs sharded at no cost where that moves less. Raises Underivable without legal rows."""
    best: Choice | None = None
    cost, failed = float("inf"), Underivable()
    for start in itertools.chain([inputs], _free_shardings(chooser, inputs)):
        try:
            choice = chooser.run(start, outputs)
        except Underivable as error:
            failed = error if start is inputs else failed
            continue
        nbytes = moved_bytes(chooser, choice, start)
        if start is inputs or nbytes < cost:
            best, cost = choice, nbytes
        if start is inputs and cost < _BYTE:
            break
    if best is None:
        raise failed
    return best


def _free_shardings(chooser: Chooser, inputs: Mapping[int, States]) -> Iterator[dict[int, States]]:
    """The inputs with all that can be sharded at no cost sharded, on a dim as long as the sharded dim of another input."""
    values, weights, written = chooser.values, chooser.weights, _written(chooser)
    # per input and axis: (input, axis, dim)
    options: list[list[tuple[int, int, int]]] = []
    for axis in range(chooser.context.ndim):
        lengths = {
            values[i].shape[int(s[axis])]  # type: ignore[arg-type]
            for i, s in inputs.items()
            if i not in weights and isinstance(s[axis], int)
        }
        for i, states in inputs.items():
            free = states[axis] == X or (states[axis] == I and i in chooser.constants)
            if free and i not in weights and i not in written:
                dims = [d for d, size in enumerate(values[i].shape) if size in lengths]
                if dims:
                    options.append([(i, axis, dim) for dim in dims])
    if not options:
        return
    for shards in itertools.islice(itertools.product(*options), MAX_TRIALS):
        changed = dict(inputs)
        for i, axis, dim in shards:
            changed[i] = (*changed[i][:axis], dim, *changed[i][axis + 1 :])
        yield changed


def _written(chooser: Chooser) -> set[int]:
    """Values that the call writes to, directly or through a view: a shard would be a copy."""
    root: dict[int, int] = {}
    written = set()
    for node in chooser.nodes:
        if node.ins:
            base = root.get(node.ins[0].i, node.ins[0].i)
            if node.mutates:
                written.add(base)
            if is_view(node):
                root.update((ref.i, base) for ref in node.outs)
    return written


def moved_bytes(chooser: Chooser, choice: Choice, inputs: Mapping[int, States]) -> float:
    """Bytes communicated, forward and backward, by all conversions of a choice; each is made once."""
    states: dict[int, States] = dict(inputs)
    whole = (I,) * chooser.context.ndim
    seen: set[tuple[int, States]] = set()
    total = 0.0
    for node, ins, outs in zip(chooser.nodes, choice.ins, choice.outs, strict=True):
        for ref, wanted in zip(node.ins, ins, strict=True):
            if (ref.i, wanted) in seen:
                continue
            seen.add((ref.i, wanted))
            value = chooser.values[ref.i]
            grad, weight = value.differentiable and ref.i not in chooser.constants, ref.i in chooser.weights
            for a, b, n in zip(states.get(ref.i, whole), wanted, chooser.context.sizes, strict=True):
                cost = 0.0 if n == 1 else conversion_cost(a, b, value.nbytes, n, weight, grad)
                total += float("inf") if cost is None else cost
        states.update((ref.i, made) for ref, made in zip(node.outs, outs, strict=True))
    return total


def hoist(
    nodes: Sequence[Node], results: Sequence[Ref], choice: Choice, start: Mapping[int, States]
) -> tuple[dict[int, States], dict[int, States], bool]:
    """Whether all conversions can be made before the call; ``start``: value -> its states, of the inputs.

    Returns (value -> states as produced, input -> states after conversions before the call, whether those suffice).
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
        produced.update((ref.i, states) for ref, states in zip(node.outs, outs, strict=True))
    for ref in results:
        if ref.i in start:
            possible &= wanted.setdefault(ref.i, produced[ref.i]) == produced[ref.i]
    return produced, {i: wanted.get(i, s) for i, s in start.items()}, possible


def gathers(
    nodes: Sequence[Node], choice: Choice, start: Mapping[int, States], sizes: Sequence[int]
) -> tuple[int, str]:
    """The tier of a call that moves shards, and the first op that reads one; ``start``: value -> its states, of the inputs.

    1: none is moved. 2: one is gathered or moved to another dim, and the ranks divide the work of the op that reads it.
    3: one is gathered, and each rank along that mesh axis does all the work of that op.
    """
    current, result = dict(start), (1, "")
    for node, ins, outs in zip(nodes, choice.ins, choice.outs, strict=True):
        for ref, wanted in zip(node.ins, ins, strict=True):
            for axis, (a, b) in enumerate(zip(current.get(ref.i, wanted), wanted, strict=True)):
                if a == b or not isinstance(a, int) or sizes[axis] == 1:
                    continue
                divided = any(not isinstance(s[axis], str) or s[axis] == P for s in (*ins, *outs))
                tier = 2 if divided else 3
                if tier > result[0]:
                    verb = "moves" if isinstance(b, int) else "gathers"
                    result = tier, f"{node.name} {verb} a value that is sharded on dim {int(a)}"
        current.update((ref.i, made) for ref, made in zip(node.outs, outs, strict=True))
    return result


def check_writes(
    nodes: Sequence[Node],
    results: Sequence[Ref],
    choice: Choice,
    start: Mapping[int, States],
    copies: Collection[int] = (),
) -> bool:
    """Whether an output is a view of an input that was moved; a write through such a view is refused.

    ``copies``: inputs that are copies of views already. Raises Underivable if the write would not reach the tensor that it
    is meant for.
    """
    root: dict[int, int] = {i: i for i in start}
    moved: dict[int, bool] = {i: i in copies for i in start}
    current: dict[int, States] = dict(start)
    for node, ins, outs in zip(nodes, choice.ins, choice.outs, strict=True):
        if node.ins and (is_view(node) or node.mutates):
            i = node.ins[0].i
            is_copy = moved.get(i, False) or (
                i in current and tuple(map(forward_kind, current[i])) != tuple(map(forward_kind, ins[0]))
            )
            if node.mutates and i in root and is_copy:
                raise Underivable("writes through a view that had to be moved")
            if i in root:
                for ref in node.outs:
                    root[ref.i], moved[ref.i] = root[i], is_copy
        current.update({r.i: s for r, s in zip(node.outs, outs, strict=True)})
    return any(moved.get(r.i, False) for r in results if r.i in root)
