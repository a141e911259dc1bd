"""A tape of any number of rows, from two that were recorded: sizes are straight lines in the rows.

A rank's part of the batch has another number of rows in every combination of degrees.  What a model does to more rows is
what it does to fewer, on larger tensors; so two recordings say what all sizes are.  Two points lie on a line whatever the sizes
do between and behind them: where one does not grow as the rows do (logits of all pairs of rows, say), a third recording tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright_dtensor.trace.graph import Node, Ref, Value
from meshwright_planner.trace.tape import Saved, Tape

_Rule = Callable[[int], Any]
"""Rows -> what stands in that place."""


class _Bent(Exception):
    """Two tapes do not belong together, or a size is no straight line."""


class Family:
    """Tapes of one program at any number of rows.

    Attributes:
        sure: every size that changes is the rows times something, in one dim of a shape.
    """

    def __init__(self, first: Tape, second: Tape) -> None:
        """`first` and `second` were recorded with different numbers of rows.

        Raises:
            ValueError: they are not of one program, or something in them is no straight line in the rows.
        """
        self.first, self._rows, self.sure = first, (first.rows, second.rows), True
        try:
            self._learn(second)
        except _Bent as bent:
            raise ValueError(str(bent)) from None

    def at(self, rows: int) -> Tape | None:
        """The tape of `rows` rows; None where a size would be no whole number."""
        first = self.first
        values, nodes, saved = list(first.values), list(first.nodes), [*first.saved, *first.dropped]
        try:
            for i, shape, stride in self._values:
                old = values[i]
                values[i] = Value(shape(rows), stride(rows), old.dtype, old.requires_grad, old.name)
            for i, args, kwargs, flops in self._nodes:
                nodes[i] = replace(nodes[i], args=args(rows), kwargs=kwargs(rows), flops=flops(rows))
            for i, nbytes in self._saved:
                saved[i] = saved[i]._replace(nbytes=nbytes(rows))
            for i, root in self._whole:
                saved[i] = saved[i]._replace(nbytes=values[root].nbytes)
        except _Bent:
            return None
        own = len(first.saved)
        kept, dropped = saved[:own], saved[own:]
        return replace(
            first, values=values, nodes=nodes, saved=kept, dropped=dropped, rows=rows, origin=first
        )

    def says(self, other: Tape) -> bool:
        """Whether a tape that was recorded with yet another number of rows is what these two make of it."""
        own = self.at(other.rows)
        return (
            own is not None
            and alike(own, other)
            and all(x.shape == y.shape and x.stride == y.stride for x, y in zip(own.values, other.values))
            and all(_same((n.args, n.kwargs), (m.args, m.kwargs)) for n, m in zip(own.nodes, other.nodes))
            and all(math.isclose(n.flops, m.flops) for n, m in zip(own.nodes, other.nodes))
            and all(s.nbytes == t.nbytes for s, t in zip(_items(own), _items(other)))
        )

    def _learn(self, second: Tape) -> None:
        a, b = self.first, second
        if not alike(a, b):
            raise _Bent("the tapes are of different operations")
        self._values: list[tuple[int, _Rule, _Rule]] = []
        for i, (x, y) in enumerate(zip(a.values, b.values, strict=True)):
            if x.dtype != y.dtype or x.name != y.name:
                raise _Bent("the tapes are of different values")
            if x.shape != y.shape or x.stride != y.stride:
                self.sure &= sum(p != q for p, q in zip(x.shape, y.shape)) < 2
                self._values.append((i, self._rule(x.shape, y.shape), self._rule(x.stride, y.stride)))
        self._nodes: list[tuple[int, _Rule, _Rule, _Rule]] = []
        for i, (n, m) in enumerate(zip(a.nodes, b.nodes, strict=True)):
            if n.flops != m.flops or not _same((n.args, n.kwargs), (m.args, m.kwargs)):
                rules = self._rule(n.args, m.args), self._rule(n.kwargs, m.kwargs)
                self._nodes.append((i, *rules, self._power(n.flops, m.flops)))
        self._saved: list[tuple[int, _Rule]] = []
        self._whole: list[tuple[int, int]] = []  # what is kept is all of a storage that is known
        for i, (s, t) in enumerate(zip(_items(a), _items(b), strict=True)):
            root = s.root
            if root is not None and (s.nbytes, t.nbytes) == (a.values[root].nbytes, b.values[root].nbytes):
                if s.nbytes != t.nbytes:
                    self._whole.append((i, root))
            elif s.nbytes != t.nbytes:
                self._saved.append((i, self._rule(s.nbytes, t.nbytes)))

    def _rule(self, x: Any, y: Any) -> _Rule:
        """What stands where `x` and `y` stand."""
        if _same(x, y):
            return lambda rows: x
        if isinstance(x, (tuple, list)) and type(x) is type(y) and len(x) == len(y):
            kind, inner = type(x), [self._rule(p, q) for p, q in zip(x, y)]
            return lambda rows: kind([rule(rows) for rule in inner])
        if isinstance(x, dict) and isinstance(y, dict) and x.keys() == y.keys():
            by_key = {key: self._rule(x[key], y[key]) for key in x}
            return lambda rows: {key: rule(rows) for key, rule in by_key.items()}
        if type(x) is int and type(y) is int:
            return self._line(x, y)
        raise _Bent(f"{x!r} and {y!r} are no numbers on a line")

    def _line(self, x: int, y: int) -> _Rule:
        a, b = self._rows
        self.sure &= x * b == y * a

        def at(rows: int) -> int:
            value, rest = divmod((y - x) * (rows - a), b - a)
            if rest or x + value < 0:
                raise _Bent("no whole number")
            return x + value

        return at

    def _power(self, x: float, y: float) -> _Rule:
        """Operations of products grow with a power of the rows."""
        if x == y or x <= 0 or y <= 0:
            self.sure &= x == y
            return lambda rows: x
        a, b = self._rows
        self.sure &= x * b == y * a
        power = math.log(y / x) / math.log(b / a)
        return lambda rows: float(round(x * (rows / a) ** power))


def alike(a: Tape, b: Tape) -> bool:
    """Whether two tapes are of the same operations, whatever their sizes."""
    return (
        (len(a.values), len(a.nodes)) == (len(b.values), len(b.nodes))
        and (len(a.saved), len(a.dropped)) == (len(b.saved), len(b.dropped))
        and (a.results, a.grad, a.parameters) == (b.results, b.grad, b.parameters)
        and (a.flows, a.again, a.inside) == (b.flows, b.again, b.inside)
        and all(_same_node(n, m) for n, m in zip(a.nodes, b.nodes))
        and all(_same_kept(s, t) for s, t in zip(_items(a), _items(b)))
    )


def _items(tape: Tape) -> list[Saved]:
    """What autograd keeps, and what checkpoints of the model give up of that."""
    return [*tape.saved, *tape.dropped]


def _same_node(n: Node, m: Node) -> bool:
    return (n.name, n.module, n.call, n.ins, n.outs) == (m.name, m.module, m.call, m.ins, m.outs)


def _same_kept(s: Saved, t: Saved) -> bool:
    return (s.node, s.root, s.value, s.output) == (t.node, t.root, t.value, t.output)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return type(x) is type(y) and len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, Ref):
        return isinstance(y, Ref) and x.i == y.i
    return bool(x is y or (type(x) is type(y) and x == y))
