"""Chooses a legal row for each recorded op, given the states of the inputs.

The rules say which rows are legal.  The policy chooses: move nothing that need not move; reduce a Partial once, as soon as
an operand does not allow it to stay Partial; move an activation rather than a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from meshwright_dtensor.random import draws_by_element
from meshwright_dtensor.rules import NodeView, RuleBook, Strategy, is_random, refine
from meshwright_dtensor.sharding.boxes import local_shape_of, uneven_dims
from meshwright_dtensor.sharding.intervals import IntervalShard, repeat_to_fit
from meshwright_dtensor.sharding.states import I, P, R, State, States, X, forward_kind, gradient_kind
from meshwright_dtensor.trace.graph import Node, Ref, Value

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import AttentionForm, MeshContext

_WEIGHT = 1000.0
"""Factor between the cost of moving a parameter and that of an activation of the same size."""

_STEP = 1e-6
"""Cost of a conversion that moves nothing, so that keeping the state wins ties."""


@dataclass(frozen=True)
class MeshShape:
    """A mesh that need not exist: names of axes, outermost first, and ranks along each; ``attention`` as of a MeshContext."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    attention: Mapping[str, AttentionForm] = field(default_factory=dict)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    def local(self, shape: Sequence[int], states: States) -> tuple[int, ...]:
        """Shape of what the first rank holds of a value: no rank holds more."""
        return local_shape_of(tuple(shape), self.sizes, (0,) * self.ndim, states)


Axes: TypeAlias = "MeshContext | MeshShape"
"""Mesh axes that a choice depends on: of a mesh, or of one that does not exist yet."""


@dataclass(slots=True)
class Choice:
    """States of every op's inputs and outputs, per node and tensor: one state per mesh axis."""

    ins: list[list[States]] = field(default_factory=list)
    outs: list[list[States]] = field(default_factory=list)


def moved(a: State, b: State, n: int) -> float:
    """Fraction of the full tensor that each rank sends for a change of kind."""
    if a == b:
        return 0.0
    if a == P:
        return (2.0 if b == R else 1.0) * (n - 1) / n
    if isinstance(a, int):
        if b == R:
            return (n - 1) / n
        return (n - 1) / n / n if isinstance(b, int) else 0.0
    return 0.0


def conversion_cost(
    a: State, b: State, nbytes: float, n: int, weight: bool = False, grad: bool = True
) -> float | None:
    """Bytes communicated, forward plus backward, to convert state ``a`` to ``b``; None when it is forbidden."""
    if a == b:
        return 0.0
    if isinstance(a, int) and b == P:
        return None
    forward = moved(forward_kind(a), forward_kind(b), n)
    backward = moved(gradient_kind(b), gradient_kind(a), n) if grad else 0.0
    factor = _WEIGHT if weight and (forward or isinstance(b, int)) else 1.0
    return (forward * factor + backward) * nbytes + _STEP


class Underivable(Exception):
    """The call has no local program; it is gathered and run replicated."""


@dataclass
class Chooser:
    """Goes through recorded nodes in order, one mesh axis after the other, outermost first.

    Args:
        weights: indices of values that are parameters.
        constants: indices of values that never need a gradient, so that I and X are the same for them. Values that are
            computed of no inputs are added.
    """

    context: Axes
    book: RuleBook
    nodes: Sequence[Node]
    values: Sequence[Value]
    weights: Collection[int]
    constants: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        made: set[int] = set()
        for node in self.nodes:
            if made.issuperset(r.i for r in node.ins):
                made.update(r.i for r in node.outs)
        self.constants = self.constants.union(made)

    @cached_property
    def _temporaries(self) -> set[int]:
        """Values in memory of their own."""
        made = {r.i for n in self.nodes if not is_view(n) for r in n.outs}
        return made - {r.i for n in self.nodes if is_view(n) and not n.mutates for r in n.ins}

    def _keeps(self, node: Node, position: int, state: State) -> bool:
        """Whether an input of a node keeps its state, as the op writes to it; a temporary may be reduced before."""
        return node.mutates and position == 0 and not (state == P and node.ins[0].i in self._temporaries)

    def run(self, inputs: Mapping[int, States], outputs: Sequence[State | None] = ()) -> Choice:
        """States for every node.

        Args:
            inputs: value -> its states, of values that no node computes; values that are left out are replicated.
            outputs: per mesh axis a state that the last node's first output should have, where legal.
        """
        per_axis: list[list[Strategy]] = []
        for axis, n in enumerate(self.context.sizes):
            if n == 1:
                rows = [Strategy((I,) * len(k.ins), (I,) * len(k.outs), "replicate") for k in self.nodes]
            else:
                goal = outputs[axis] if axis < len(outputs) else None
                rows = self._axis(axis, inputs, per_axis, goal)
            per_axis.append(rows)
        choice = Choice()
        for k, node in enumerate(self.nodes):
            choice.ins.append([tuple(rows[k].ins[j] for rows in per_axis) for j in range(len(node.ins))])
            choice.outs.append([tuple(rows[k].outs[j] for rows in per_axis) for j in range(len(node.outs))])
        return choice

    def _axis(
        self, axis: int, inputs: Mapping[int, States], earlier: list[list[Strategy]], goal: State | None
    ) -> list[Strategy]:
        n = self.context.sizes[axis]
        env: dict[int, State] = {i: states[axis] for i, states in inputs.items()}
        attention = self.context.attention.get(self.context.axes[axis])
        chosen: list[Strategy] = []
        for k, node in enumerate(self.nodes):
            shapes, frozen = self._local_shapes(k, node, earlier)
            view = NodeView(node, n, _lookup(shapes), lambda ref: self.values[ref.i].dtype, attention)
            want = goal if k == len(self.nodes) - 1 else None
            if isinstance(want, IntervalShard):
                want = repeat_to_fit(want, view.out_shapes[0], n) if view.out_shapes else None
            rows, refs = self._rows(view, env, want), (*node.ins, *node.outs)
            costs: list[tuple[float, float, int, int]] = []
            for order, row in enumerate(rows):
                pairs = zip(refs, row.ins + row.outs, strict=True)
                if frozen and any(isinstance(s, int) and (ref.i, int(s)) in frozen for ref, s in pairs):
                    continue
                key = self._cost(node, row, env, n, want)
                if key is not None:
                    costs.append((*key, order))
            if not costs:
                raise Underivable(f"no legal row for {node.name} on mesh axis {self.context.axes[axis]!r}")
            best = rows[min(costs)[-1]]
            chosen.append(best)
            for ref, state in zip(node.outs, best.outs, strict=True):
                env[ref.i] = state
        return chosen

    def _rows(self, view: NodeView, env: dict[int, State], goal: State | None = None) -> list[Strategy]:
        node = view.node
        rows = list(self.book.strategies(view))
        current = [(env.get(r.i, I),) for r in node.ins]
        if not is_random(node) and any(isinstance(s, int) for (s,) in current):
            wanted = [(goal,)] if isinstance(goal, IntervalShard) and len(node.outs) == 1 else ()
            rows = self.book.lifted(view, rows, current, wanted)
        if is_random(node):
            first, rows = current[0][0] if current else I, rows[:1]
            if isinstance(first, int) and draws_by_element(node.op):
                shape = view.in_shapes[0]
                if all(view.shape(r) == shape for r in node.outs):
                    ins = tuple(first if view.shape(r) == shape else R for r in node.ins)
                    rows.append(Strategy(ins, (first,) * len(node.outs), "random"))
        return refine(view, rows, lambda ref: self.values[ref.i].differentiable)

    def _cost(
        self, node: Node, row: Strategy, env: dict[int, State], n: int, goal: State | None
    ) -> tuple[float, float, int] | None:
        """(missed goal, cost of conversions, -sharded outputs) of a row; None when the policy forbids it."""
        current = [env.get(r.i, I) for r in node.ins]
        missed = 0.0 if goal is None or not row.outs or row.outs[0] == goal else 1.0
        # replicated inputs are not sharded unless the plan wants that
        if (goal is None or missed) and all(map(_replicated, current)):
            if not all(map(_replicated, row.ins + row.outs)):
                return None
        total = 0.0
        for position, (ref, a, b) in enumerate(zip(node.ins, current, row.ins, strict=True)):
            if a == b:
                continue
            if self._keeps(node, position, a) or not _may_convert(current, row, position):
                return None
            value = self.values[ref.i]
            if ref.i in self.constants and _replicated(a) and _replicated(b):
                continue
            grad = value.differentiable and ref.i not in self.constants
            cost = conversion_cost(a, b, value.nbytes, n, ref.i in self.weights, grad)
            if cost is None:
                return None
            total += cost
        return missed, total, -sum(isinstance(s, int) for s in row.outs)

    def _local_shapes(
        self, k: int, node: Node, earlier: list[list[Strategy]]
    ) -> tuple[dict[int, tuple[int, ...]], set[tuple[int, int]]]:
        """Shapes local to the earlier axes (on their first rank), and (value, dim) sharded unevenly there."""
        shapes: dict[int, tuple[int, ...]] = {}
        uneven: set[tuple[int, int]] = set()
        sizes = self.context.sizes[: len(earlier)]
        chosen = [rows[k].ins + rows[k].outs for rows in earlier]
        for j, ref in enumerate((*node.ins, *node.outs)):
            shape, states = self.values[ref.i].shape, tuple(row[j] for row in chosen)
            shapes[ref.i] = local_shape_of(shape, sizes, (0,) * len(sizes), states)
            uneven |= {(ref.i, d) for d in uneven_dims(shape, sizes, states)}
        return shapes, uneven


def is_view(node: Node) -> bool:
    """Whether results of an op may share memory with its first input."""
    return node.op is not None and any(r.alias_info is not None for r in node.op._schema.returns)


def _lookup(shapes: dict[int, tuple[int, ...]]) -> Callable[[Ref], tuple[int, ...]]:
    return lambda ref: shapes[ref.i]


def _replicated(state: State) -> bool:
    return state in (I, X)


def _may_convert(current: Sequence[State], row: Strategy, position: int) -> bool:
    """Whether the policy lets the input at ``position`` be converted to the state of the row."""
    a, b = current[position], row.ins[position]
    # a replicated value does not become Partial (a bias joins the partial sums of a matmul instead)
    if b == P and _replicated(a):
        return any(isinstance(state, int) for state in row.ins)
    # a Partial is reduce-scattered only when another operand is already sharded on that dim
    if a == P and isinstance(b, int):
        others = (j for j in range(len(current)) if j != position)
        return any(current[j] == row.ins[j] == b for j in others)
    return True
