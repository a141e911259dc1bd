"""Input and output of a sharding rule: a node as one mesh axis sees it, and its legal rows of states.

A *row* gives one state per tensor input and output: ``"R"`` (replicated), ``"P"`` (partial sum) or ``int`` (shard of that
tensor dim). Running the op on local inputs in these states gives local outputs in these states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.sharding.boxes import shardable
from meshwright_dtensor.sharding.states import I, P, R, State, States, X
from meshwright_dtensor.trace.graph import Node, Ref, Value, is_ref

_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

Row: TypeAlias = tuple[States, States]
"""(states of node.ins, states of node.outs)."""


def aten_ops(names: str) -> frozenset[str]:
    """``"aten.add"`` and ``"aten.sub"`` of ``"add sub"``."""
    return frozenset("aten." + name for name in names.split())


RESHAPES = aten_ops("view _unsafe_view reshape _reshape_alias view_copy")
SLICES = aten_ops("slice slice_copy")
SPLITS = aten_ops(
    "split split_with_sizes split_copy split_with_sizes_copy unsafe_split unsafe_split_with_sizes"
)
"""Ops whose size arguments are those of the local tensor, and that move elements of a sharded dim."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder of the tensor input ``node.ins[index]`` among bound arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as one mesh axis of size ``n`` sees it; shapes may already be local to earlier axes.

    ``attention``: context-parallel form of the axis (all_gather, ring or all_to_all), None if it has none.
    """

    node: Node
    n: int
    shape: Callable[[Ref], tuple[int, ...]]
    dtype: Callable[[Ref], torch.dtype]
    attention: str | None = None

    @classmethod
    def of(cls, node: Node, values: Sequence[Value], n: int) -> NodeView:
        """The view with the global shapes of recorded ``values``."""
        return cls(node, n, lambda ref: values[ref.i].shape, lambda ref: values[ref.i].dtype)

    @classmethod
    def with_shapes(
        cls, node: Node, shapes: Mapping[Ref, tuple[int, ...]], dtypes: Mapping[Ref, torch.dtype], n: int
    ) -> NodeView:
        """The view with the given shapes and dtypes."""
        return cls(node, n, shapes.__getitem__, dtypes.__getitem__)

    @property
    def in_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensor inputs."""
        return [self.shape(r) for r in self.node.ins]

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensor outputs."""
        return [self.shape(r) for r in self.node.outs]

    def bound(self) -> dict[str, Any]:
        """Arguments of an aten op by schema name, defaults (or None) filled in, the i-th tensor as ``Slot(i)``."""
        leaves, spec = pytree.tree_flatten((self.node.args, self.node.kwargs), is_leaf=is_ref)
        slots = map(Slot, itertools.count())
        args, kwargs = pytree.tree_unflatten([next(slots) if isinstance(x, Ref) else x for x in leaves], spec)
        values: dict[str, Any] = {}
        for position, argument in enumerate(self.node.op._schema.arguments):
            if position < len(args) and not argument.kwarg_only:
                values[argument.name] = args[position]
            else:
                values[argument.name] = kwargs.get(argument.name, argument.default_value)
        return values

    def floating(self, index: int) -> bool:
        """Whether tensor input ``index`` is floating point or complex."""
        dtype = self.dtype(self.node.ins[index])
        return dtype.is_floating_point or dtype.is_complex


SOURCES = frozenset({"hand", "einsum", "view", "pointwise", "factory", "plugin"})
"""What a rule may give as the source of its rows. All but "plugin" promise rows that hold for any division of the
elements, not only for equal chunks; "factory": no gradient flows from the outputs to the inputs."""


Rule: TypeAlias = Callable[[NodeView], Iterable[Row]]
"""Yields legal rows; the rule book drops those that do not fit the shapes or the axis size."""


class RuleEntry(NamedTuple):
    """A rule in the rule book.

    Attributes:
        rule: rows of a node.
        source: one of SOURCES; rows of ``"plugin"`` are checked before use.
        complete: replicated outputs next to sharded inputs carry no gradient.
    """

    rule: Rule
    source: str
    complete: bool = False


def rules(source: str, *entries: tuple[str, Rule], complete: bool = False) -> dict[str, RuleEntry]:
    """op name -> rule, from (names of aten ops separated by spaces, their rule); see RuleEntry."""
    return {f"aten.{op}": RuleEntry(rule, source, complete) for ops, rule in entries for op in ops.split()}


@dataclass(frozen=True, slots=True)
class Strategy:
    """A legal row of states.

    Attributes:
        ins: state of every ``node.ins``.
        outs: state of every ``node.outs``.
        source: origin of the row: ``"hand"``, ``"einsum"``, ``"view"``, ``"pointwise"``, ``"plugin"``,
            ``"factory"`` (the outputs carry no gradient to the inputs) or ``"replicate"``.
        complete: replicated outputs have complete gradients although an input is sharded (the composite reduces inside).
    """

    ins: States
    outs: States
    source: str
    complete: bool = False


def replicate(view: NodeView) -> Strategy:
    """The row with everything replicated; always legal."""
    return Strategy((R,) * len(view.node.ins), (R,) * len(view.node.outs), "replicate")


def finish(view: NodeView, rows: Iterable[Row], source: str, complete: bool = False) -> list[Strategy]:
    """The replicated row, then those of ``rows`` that fit shapes, axis size and mutation, without repeats."""
    result = [replicate(view)]
    seen = {(result[0].ins, result[0].outs)}
    ties = mutation_ties(view)
    if ties is None:
        return result
    tensors, shapes = view.node.ins, view.in_shapes + view.out_shapes
    distinct = len(set(tensors))
    for ins, outs in rows:
        if (ins, outs) in seen or len(ins) != len(tensors) or len(outs) != len(view.node.outs):
            continue
        # a tensor that is passed twice has one state
        one_state = distinct == len(tensors) or len(set(zip(tensors, ins, strict=True))) == distinct
        if one_state and _fits(ins + outs, shapes, view.n) and all(ins[i] == outs[o] for i, o in ties):
            seen.add((ins, outs))
            result.append(Strategy(ins, outs, source, complete))
    return result


def _fits(states: States, shapes: Sequence[tuple[int, ...]], n: int) -> bool:
    sizes = set()
    for state, shape in zip(states, shapes, strict=True):
        if isinstance(state, int):
            if not 0 <= state < len(shape) or not shardable(shape[state], n):
                return False
            sizes.add(shape[state])
    # uneven chunks only match chunks of the same size
    return len(sizes) <= 1 or all(size % n == 0 for size in sizes)


def refine(view: NodeView, rows: Iterable[Strategy], needs_grad: Callable[[Ref], bool]) -> list[Strategy]:
    """Rows over I, X, P and dims.

    The replicated row splits in two: gradients complete everywhere (I), or partial everywhere (X).  In any other row a
    replicated input gets a partial gradient (X), since every rank sees part of the work; and a replicated output that
    needs a gradient makes the row illegal, unless the row says that its gradients are ``complete``.  Where no output
    carries a gradient to the inputs, replicated inputs are I.
    """
    ins, outs = view.node.ins, view.node.outs
    rows = list(rows)
    severed = any(row.source == "factory" for row in rows)
    out_grad = [needs_grad(r) and not severed for r in outs]
    in_grad = [needs_grad(r) and any(out_grad) for r in ins]

    def partial(states: States, grads: list[bool]) -> States:
        return tuple((X if g else I) if s == R else s for s, g in zip(states, grads, strict=True))

    result: dict[tuple[States, States], Strategy] = {}
    for row in rows:
        if all(state == R for state in row.ins + row.outs):
            options: list[tuple[States, States]] = [((I,) * len(ins), (I,) * len(outs))]
            if any(out_grad):
                options.append((partial(row.ins, in_grad), partial(row.outs, out_grad)))
        else:
            if not row.complete and any(s == R and g for s, g in zip(row.outs, out_grad, strict=True)):
                continue
            options = [(partial(row.ins, in_grad), tuple(I if s == R else s for s in row.outs))]
        for key in options:
            result.setdefault(key, Strategy(key[0], key[1], row.source, row.complete))
    return list(result.values())


def mutation_ties(view: NodeView) -> list[tuple[int, int]] | None:
    """(input, output) positions that are one storage; None when a mutated input is not among the outputs.

    An op that only changes the shape in place (transpose_) writes to no storage: the rule gives its result's state.
    """
    op = view.node.op
    if op is None or not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return []
    bound, ties = view.bound(), []
    for argument in op._schema.arguments:
        slot = bound[argument.name]
        if slot is None or argument.alias_info is None or not argument.alias_info.is_write:
            continue
        back = [
            k
            for k, r in enumerate(op._schema.returns)
            if r.alias_info is not None and r.alias_info.before_set == argument.alias_info.before_set
        ]
        if argument.kwarg_only or not isinstance(slot, Slot) or len(back) != 1:
            return None
        ties.append((slot.index, back[0]))
    return ties


def is_random(node: Node) -> bool:
    """Whether an aten op draws random numbers; tagged attention and recurrent layers do not without dropout."""
    if node.op is None or torch.Tag.nondeterministic_seeded not in node.op.tags:
        return False
    for position, argument in enumerate(node.op._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return bool(given != 0.0)
    return True


def needs_data(node: Node) -> bool:
    """Whether values or shapes of an aten op's outputs depend on input values, so that it does not run on fake tensors."""
    return node.op is not None and any(tag in node.op.tags for tag in _DATA_DEPENDENT)


def broadcast_state(dim: int, whole: Sequence[int], shape: Sequence[int]) -> State:
    """The state of an operand of ``shape`` that broadcasts to ``whole``, which is sharded on ``dim``."""
    index = dim - len(whole) + len(shape)
    return index if index >= 0 and shape[index] == whole[dim] else R


def kept_rows(view: NodeView, dims: Iterable[int]) -> Iterator[Row]:
    """The first input and all outputs sharded on one of ``dims``, the other inputs replicated."""
    rest = (R,) * (len(view.node.ins) - 1)
    for dim in dims:
        yield (dim, *rest), (dim,) * len(view.node.outs)


def other_dims(view: NodeView, argument: str = "dim") -> tuple[int, list[int]]:
    """The dim of the first input that an ``argument`` of the op names, and all other dims."""
    ndim = len(view.in_shapes[0])
    used = view.bound()[argument] % max(ndim, 1)
    return used, [dim for dim in range(ndim) if dim != used]


def linear_row(view: NodeView, *slots: int) -> Row:
    """Partial in the inputs ``slots`` (in which the op is jointly linear), replicated elsewhere, partial out."""
    return tuple(P if i in slots else R for i in range(len(view.node.ins))), (P,) * len(view.node.outs)


def dims_of(value: Any, ndim: int) -> list[int]:
    """A dim argument (int, list, None or empty for all) as sorted non-negative dims."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return list(range(ndim))
    return sorted({d % max(ndim, 1) for d in ([value] if isinstance(value, int) else value)})


def base_name(name: str) -> str:
    """``"aten.add"`` of ``"aten.add.Tensor"``."""
    return ".".join(name.split(".")[:2])


def numel(shape: Sequence[int]) -> int:
    """Number of elements."""
    return math.prod(shape)
