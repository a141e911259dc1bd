"""Every row of every rule, on a broad table of ops and argument variants, against the whole op: value and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from op_cases import TABLE, D, Spec

from meshwright_dtensor.rules import NodeView, RuleBook, Strategy, across, check
from meshwright_dtensor.trace.graph import Node, Recorder, Value


def record(
    function: Callable[..., Any], specs: Sequence[Spec], grad: bool = False
) -> tuple[list[Node], list[Value]]:
    """The nodes that ``function`` runs on tensors of (shape, dtype)."""
    tensors = []
    for shape, *dtype in specs:
        kind = dtype[0] if dtype else D
        if kind.is_floating_point or kind.is_complex:
            tensors.append((torch.rand(shape, dtype=D) + 0.1).to(kind).requires_grad_(grad))
        else:
            tensors.append(torch.zeros(shape, dtype=kind))
    recorder = Recorder({}, tensors)
    with recorder, torch.no_grad():
        function(*tensors)
    return recorder.nodes, recorder.values


@pytest.fixture(scope="module")
def book() -> RuleBook:
    """The first-party rules."""
    return RuleBook.first_party()


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", TABLE)
def test_op_rows_equal_the_whole_op(case: str, n: int, book: RuleBook) -> None:
    nodes, values = record(*TABLE[case])
    assert nodes
    for node in nodes:
        view = NodeView.of(node, values, n)
        rows = book.strategies(view)
        assert rows[0].source == "replicate"
        for row in rows if node.ins else rows[:0]:
            states = [[(state,) for state in of] for of in (row.ins, row.outs)]
            if across.is_combined(view, *states):
                # run on real ranks in test_across.py
                continue
            assert check(view, row), f"{node} {view.in_shapes}: {row}"


def rows_of(
    book: RuleBook, function: Callable[..., Any], specs: Sequence[Spec], n: int = 2
) -> set[tuple[Any, Any]]:
    """(ins, outs) of the last node that ``function`` runs."""
    nodes, values = record(function, specs)
    return {(r.ins, r.outs) for r in book.strategies(NodeView.of(nodes[-1], values, n))}


COVERAGE: list[tuple[str, tuple[Any, Any]]] = [
    ("pointwise: add broadcast", ((1, 0), (1,))),
    ("pointwise: add broadcast", ((2, "R"), (2,))),
    ("pointwise: mul", (("P", "R"), ("P",))),
    ("view: view split", ((2,), (2,))),
    ("view: view merge", ((0,), (0,))),
    ("view: cat legacy", (("R", 0), (0,))),
    ("view: expand", (("R",), (0,))),
    ("reduction: mean -1 False", ((1,), (1,))),
    ("reduction: sum 1 True", ((1,), ("P",))),
    ("reduction: layer_norm", ((1, "R", "R"), (1, 1, 1))),
    ("reduction: cumsum -1", ((0,), (0,))),
    ("reduction: count_nonzero", ((1,), ("P",))),
    ("reduction: histc", ((1,), ("P",))),
    ("reduction: histc one dim", ((0,), ("P",))),
    ("reduction: histogram", ((0,), ("P", "R"))),
    ("reduction: histogram bins", ((1, "R"), ("P", "R"))),
    ("reduction: histogram weight", ((0, 0), ("P", "R"))),
    ("matmul: addmm", (("P", 1, 0), ("P",))),
    ("matmul: conv2d bias", ((1, 1, "P"), ("P",))),
    ("matmul: depthwise", ((1, 0, 0), (1,))),
    ("indexing: embedding", ((1, "R"), (2,))),
    ("indexing: gather", (("R", 1), (1,))),
    ("indexing: index", (("R", 0), (0,))),
    ("indexing: index", ((1, "R"), (2,))),
    ("indexing: index two", (("R", "R", 0), (1,))),
    ("indexing: index_put", ((0, "R", 0), (0,))),
    ("factory: zeros_like", (("P",), ("R",))),
    ("attention: heads", ((1, 1, 1), (1, 1))),
    ("attention: mask", ((0, 0, 0, 0), (0, 0))),
    ("in place: add_", ((1, 0), (1,))),
    ("in place: transpose_", ((0,), (2,))),
    ("in place: index_put_ mask", ((0, 0, "R"), (0,))),
    ("in place: index_put_ mask", ((2, "R", "R"), (2,))),
    ("in place: index_put_ mask rows", ((1, "R", 0), (1,))),
]


@pytest.mark.parametrize(("case", "row"), COVERAGE)
def test_expected_rows_exist(case: str, row: tuple[Any, Any], book: RuleBook) -> None:
    assert row in rows_of(book, *TABLE[case])


ABSENT: list[tuple[str, tuple[Any, Any]]] = [
    ("reduction: cumsum -1", ((1,), (1,))),
    ("reduction: softmax", ((2,), (2,))),
    ("reduction: histc unbounded", ((0,), ("P",))),
    ("reduction: histc half", ((0,), ("P",))),
    ("reduction: histogram density", ((0,), ("P", "R"))),
    ("reduction: amax -1 False", ((2,), ("P",))),
    ("reduction: var -1 False", ((2,), ("P",))),
    ("pointwise: add", (("P", "R"), ("P",))),
    ("pointwise: add scalar", (("P",), ("P",))),
    ("pointwise: to bf16", (("P",), ("P",))),
    ("reduction: cumsum to int", (("P",), ("P",))),
    ("indexing: index mask", ((1, "R"), (1,))),
    ("pointwise: square", (("P", "R"), ("P",))),
    ("view: slice", ((1,), (1,))),
    ("view: cat", ((1, 1), (1,))),
    ("view: pad value", (("P",), ("P",))),
    ("in place: mul_", (("R", 0), (0,))),
]


@pytest.mark.parametrize(("case", "row"), ABSENT)
def test_illegal_rows_do_not_exist(case: str, row: tuple[Any, Any], book: RuleBook) -> None:
    assert row not in rows_of(book, *TABLE[case])


@pytest.mark.parametrize(("count", "exact"), [(1 << 24, True), ((1 << 24) + 2, False)])
def test_float32_histogram_is_sharded_while_counts_are_exact(count: int, exact: bool, book: RuleBook) -> None:
    rows = rows_of(book, lambda a: torch.histc(a.expand(count), 5, 0, 1), [((1,), torch.float32)])
    assert (((0,), ("P",)) in rows) is exact


def test_check_catches_the_sums_of_shards() -> None:
    """The row that stock DTensor gives for cumsum(dim=-1) of a tensor sharded there."""
    nodes, values = record(lambda a: a.cumsum(-1), [((4, 6),)])
    view = NodeView.of(nodes[0], values, 2)
    assert not check(view, Strategy((1,), (1,), "dtensor"))
    assert check(view, Strategy((0,), (0,), "dtensor"))


def test_check_catches_a_nonlinear_use_of_a_partial_sum() -> None:
    nodes, values = record(torch.relu, [((4, 6),)])
    assert not check(NodeView.of(nodes[0], values, 2), Strategy(("P",), ("P",), "dtensor"))


def test_random_ops_only_run_replicated(book: RuleBook) -> None:
    nodes, values = record(lambda a: torch.bernoulli(a * 0.5), [((4, 6),)])
    assert [r.source for r in book.strategies(NodeView.of(nodes[-1], values, 2))] == ["replicate"]


def test_shapes_local_to_an_earlier_axis_decide(book: RuleBook) -> None:
    nodes, _values = record(lambda a: a.view(4, 12, 3), [((4, 36),)])
    node = nodes[0]
    shapes = {node.ins[0]: (4, 9), node.outs[0]: (4, 3, 3)}
    view = NodeView.with_shapes(node, shapes, dict.fromkeys(shapes, D), 2)
    rows = {(r.ins, r.outs) for r in book.strategies(view)}
    assert ((0,), (0,)) in rows and ((1,), (1,)) not in rows
    assert all(check(view, r) for r in book.strategies(view))


def arguments(op: Any, float_scalars: bool) -> list[Any] | None:
    """Arguments for an op of tensors and scalars: the first tensor (4, 6), the others broadcast; None for other types."""
    made: list[Any] = []
    tensors = 0
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            made.append(torch.rand((4, 6) if tensors == 0 else (6,), dtype=D) + 0.1)
            tensors += 1
        elif argument.kwarg_only or argument.has_default_value():
            continue
        elif kind in ("number", "float", "int"):
            made.append(0.5 if float_scalars and kind != "int" else 1)
        else:
            return None
    return made if tensors else None


def test_ops_with_the_pointwise_tag_are_pointwise(book: RuleBook) -> None:
    tried = 0
    for name in sorted(dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if torch.Tag.pointwise not in op.tags or op._schema.is_mutable or name.endswith("_backward"):
                continue
            given = arguments(op, True)
            if given is None:
                continue
            try:
                op(*given)
            except (RuntimeError, NotImplementedError):
                continue  # wants other dtypes or values
            nodes, values = record(lambda *tensors, op=op, given=given: op(*given), [])
            for node in nodes:
                view = NodeView.of(node, values, 2)
                rows = book.strategies(view)
                for row in rows[1:]:
                    assert check(view, row), f"{node}: {row}"
                tried += len(rows) > 1
    assert tried > 150
