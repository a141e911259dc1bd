"""The tape of any number of rows, from two recordings: sizes are linear in the number of rows.

A rank's part of the batch has another number of rows in every combination of degrees.  A model does the same operations on more
rows, on larger tensors, so two recordings determine all sizes.  When a size is not proportional to the rows (logits of all pairs
of rows, say), a third recording has to confirm that it is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from meshwright_dtensor.trace.graph import Ref, Value
from meshwright_planner.trace.tape import Saved, Tape

_Rule = Callable[[int], Any]
"""Number of rows -> the value in that place."""


class _NotLinear(ValueError):
    """Two tapes are of different programs, or a size is not linear in the rows."""


class TapeFamily:
    """Tapes of one program at any number of rows.

    `proportional`: every size that changes is proportional to the rows, in one dim of a shape.
    """

    def __init__(self, first: Tape, second: Tape) -> None:
        """`first` and `second` were recorded with different numbers of rows.

        Raises ValueError: they are of different programs, or a size is not linear in the rows.
        """
        self.first, self._rows, self.proportional = first, (first.rows, second.rows), True
        a, b = first, second
        if not same_program(a, b):
            raise _NotLinear("the tapes are of different operations")
        self._values: list[tuple[int, _Rule, _Rule]] = []
        for i, (x, y) in enumerate(zip(a.values, b.values, strict=True)):
            if x.dtype != y.dtype or x.name != y.name:
                raise _NotLinear("the tapes are of different values")
            if x.shape != y.shape or x.stride != y.stride:
                self.proportional &= sum(p != q for p, q in zip(x.shape, y.shape)) < 2
                self._values.append((i, self._rule(x.shape, y.shape), self._rule(x.stride, y.stride)))
        self._nodes: list[tuple[int, _Rule, _Rule, _Rule]] = []
        for i, (n, m) in enumerate(zip(a.nodes, b.nodes, strict=True)):
            if n.flops != m.flops or not _same((n.args, n.kwargs), (m.args, m.kwargs)):
                rules = self._rule(n.args, m.args), self._rule(n.kwargs, m.kwargs)
                self._nodes.append((i, *rules, self._power(n.flops, m.flops)))
        self._saved: list[tuple[int, _Rule]] = []
        # (saved tensor, root): a whole known storage is saved
        self._whole: list[tuple[int, int]] = []
        for i, (s, t) in enumerate(zip(_items(a), _items(b), strict=True)):
            root = s.root
            if s.nbytes == t.nbytes:
                continue
            if root is not None and (s.nbytes, t.nbytes) == (a.values[root].nbytes, b.values[root].nbytes):
                self._whole.append((i, root))
            else:
                self._saved.append((i, self._rule(s.nbytes, t.nbytes)))

    def at(self, rows: int) -> Tape | None:
        """The tape of `rows` rows; None when a size would not be an integer."""
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
        except _NotLinear:
            return None
        count = len(first.saved)
        kept, lost = saved[:count], saved[count:]
        return replace(first, values=values, nodes=nodes, saved=kept, dropped=lost, rows=rows, origin=first)

    def predicts(self, other: Tape) -> bool:
        """Whether the prediction for the number of rows of a third recording equals that recording."""
        scaled = self.at(other.rows)
        return (
            scaled is not None
            and same_program(scaled, other)
            and all(x.shape == y.shape and x.stride == y.stride for x, y in zip(scaled.values, other.values))
            and all(_same((n.args, n.kwargs), (m.args, m.kwargs)) for n, m in zip(scaled.nodes, other.nodes))
            and all(math.isclose(n.flops, m.flops) for n, m in zip(scaled.nodes, other.nodes))
            and all(s.nbytes == t.nbytes for s, t in zip(_items(scaled), _items(other)))
        )

    def _rule(self, x: Any, y: Any) -> _Rule:
        """The rule that gives `x` and `y` at the rows of the two recordings."""
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
        raise _NotLinear(f"{x!r} and {y!r} are not linear in the rows")

    def _line(self, x: int, y: int) -> _Rule:
        a, b = self._rows
        self.proportional &= x * b == y * a

        def at(rows: int) -> int:
            value, rest = divmod((y - x) * (rows - a), b - a)
            if rest or x + value < 0:
                raise _NotLinear("not an integer")
            return x + value

        return at

    def _power(self, x: float, y: float) -> _Rule:
        """FLOPs grow with a power of the rows."""
        if x == y or x <= 0 or y <= 0:
            self.proportional &= x == y
            return lambda rows: x
        a, b = self._rows
        self.proportional &= x * b == y * a
        power = math.log(y / x) / math.log(b / a)
        return lambda rows: float(round(x * (rows / a) ** power))


_PROGRAM = attrgetter("name", "module", "call", "ins", "outs")
"""The fields of a Node that do not depend on sizes."""

_PLACE = attrgetter("node", "root", "value", "output")
"""The same of a Saved."""


def same_program(a: Tape, b: Tape) -> bool:
    """Whether two tapes are of the same operations, whatever their sizes."""
    return (
        (len(a.values), len(a.nodes)) == (len(b.values), len(b.nodes))
        and (len(a.saved), len(a.dropped)) == (len(b.saved), len(b.dropped))
        and (a.results, a.grad, a.parameters) == (b.results, b.grad, b.parameters)
        and (a.flows, a.again, a.inside) == (b.flows, b.again, b.inside)
        and all(_PROGRAM(n) == _PROGRAM(m) for n, m in zip(a.nodes, b.nodes))
        and all(_PLACE(s) == _PLACE(t) for s, t in zip(_items(a), _items(b)))
    )


def _items(tape: Tape) -> list[Saved]:
    """All saved tensors, also those that checkpoints of the model drop."""
    return [*tape.saved, *tape.dropped]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return type(x) is type(y) and len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, Ref):
        return isinstance(y, Ref) and x.i == y.i
    return bool(x is y or (type(x) is type(y) and x == y))
