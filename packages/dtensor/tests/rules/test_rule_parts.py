"""The parts of the rules one by one: reshapes, refinement, localisation, shrinking, the book and plugin rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from meshwright_dtensor import plugins
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plugins import OpRuleSpec
from meshwright_dtensor.rules import (
    NodeView,
    Row,
    RuleBook,
    RuleEntry,
    Strategy,
    check,
    localise,
    refine,
)
from meshwright_dtensor.rules import book as book_module
from meshwright_dtensor.rules.ops.views import reshape_dim
from meshwright_dtensor.rules.verify_row import shrink
from meshwright_dtensor.sharding.boxes import shardable
from meshwright_dtensor.trace.graph import Node, Recorder, Ref, Value

D = torch.float64


def record(function: Callable[..., Any], *tensors: torch.Tensor) -> tuple[list[Node], list[Value]]:
    """What ``function`` does to ``tensors``."""
    recorder = Recorder({}, tensors)
    with recorder, torch.no_grad():
        function(*tensors)
    return recorder.nodes, recorder.values


def view_of(function: Callable[..., Any], *tensors: torch.Tensor, n: int = 2) -> NodeView:
    """The last node of ``function``."""
    nodes, values = record(function, *tensors)
    return NodeView.of(nodes[-1], values, n)


def true(ref: Ref) -> bool:
    """Every value needs a gradient."""
    return True


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same size."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        shape, current = [], 1
        for factor in draw(st.permutations(factors)):
            current *= factor
            if draw(st.booleans()):
                shape.append(current)
                current = 1
        return (*shape, current)

    return grouped(), grouped()


@given(reshapes(), st.integers(2, 4))
def test_a_reshape_maps_a_shard_to_the_same_elements(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], n: int
) -> None:
    before, after = shapes
    whole = torch.arange(math.prod(before))
    for dim, size in enumerate(before):
        if not shardable(size, n):
            continue
        result = reshape_dim(before, after, dim, n)
        matches = []
        for target, extent in enumerate(after):
            if shardable(extent, n):
                left = [x.flatten().tolist() for x in whole.view(before).chunk(n, dim)]
                right = [x.flatten().tolist() for x in whole.view(after).chunk(n, target)]
                if left == right:
                    matches.append(target)
        # exact both ways: a mapped dim is right, and a right dim is mapped (unless only uneven pieces coincide)
        assert result is None or result in matches
        if matches and size % n == 0:
            assert result in matches


@given(st.integers(1, 40), st.integers(1, 8))
def test_shardable_means_no_rank_is_empty(size: int, n: int) -> None:
    assert shardable(size, n) == (len(torch.arange(size).chunk(n)) == n)


def test_refined_replicated_rows_are_complete_or_partial() -> None:
    view = view_of(torch.mm, torch.ones(4, 6), torch.ones(6, 8))
    rows = refine(view, RuleBook.first_party().strategies(view), true)
    states = {(r.ins, r.outs) for r in rows}
    assert rows[0].ins == ("I", "I") and rows[1].ins == ("X", "X") and rows[1].outs == ("X",)
    assert ((0, "X"), (0,)) in states and (("X", 1), (1,)) in states and ((1, 0), ("P",)) in states
    assert all("R" not in r.ins + r.outs for r in rows)


def test_refined_inputs_without_gradient_are_i() -> None:
    view = view_of(F.embedding, torch.zeros(4, 6, dtype=torch.long), torch.ones(8, 6))
    floating = lambda ref: view.dtype(ref).is_floating_point  # noqa: E731
    states = {(r.ins, r.outs) for r in refine(view, RuleBook.first_party().strategies(view), floating)}
    assert ((1, "I"), (2,)) in states and (("X", 0), (0,)) in states
    none = {(r.ins, r.outs) for r in refine(view, RuleBook.first_party().strategies(view), lambda ref: False)}
    assert not any("X" in ins + outs for ins, outs in none)


def test_refine_drops_a_replicated_output_of_sharded_inputs_unless_complete() -> None:
    view = view_of(torch.relu, torch.ones(4, 6))
    assert refine(view, [Strategy((0,), ("R",), "hand")], true) == []
    assert refine(view, [Strategy((0,), ("R",), "hand", complete=True)], true)[0].outs == ("I",)
    assert refine(view, [Strategy((0,), ("R",), "hand")], lambda ref: False)[0].outs == ("I",)


def test_comparison_inputs_need_no_gradient_state() -> None:
    view = view_of(torch.eq, torch.ones(4, 6), torch.ones(6))
    rows = refine(
        view, RuleBook.first_party().strategies(view), lambda ref: view.dtype(ref).is_floating_point
    )
    assert ("I", "I") in {r.ins for r in rows} and (0, "I") in {r.ins for r in rows}


LOCAL: list[
    tuple[str, Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]
] = [
    ("view", lambda a: a.view(4, 3, 2), [(4, 6)], [(2, 6)], [(2, 3, 2)]),
    ("expand", lambda a: a.expand(6, 4), [(1, 4)], [(1, 2)], [(3, 2)]),
    ("squeeze", lambda a: a.squeeze(), [(2, 1, 3)], [(1, 1, 3)], [(1, 3)]),
    ("new_zeros", lambda a: a.new_zeros(6, 2), [(4, 6)], [(4, 6)], [(3, 2)]),
    ("group_norm", lambda a: F.group_norm(a, 3), [(4, 6, 5)], [(1, 6, 5)], [(1, 6, 5), (1, 3), (1, 3)]),
    ("slice whole", lambda a: a[:, -6:], [(4, 6)], [(4, 2)], [(4, 2)]),
    (
        "depthwise",
        lambda a, w: F.conv1d(a, w, groups=6),
        [(4, 6, 5), (6, 1, 3)],
        [(4, 2, 5), (2, 1, 3)],
        [(4, 2, 3)],
    ),
]


@pytest.mark.parametrize(
    ("name", "function", "shapes", "local_in", "local_out"), LOCAL, ids=[c[0] for c in LOCAL]
)
def test_localised_ops_give_local_shapes(
    name: str,
    function: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    local_in: list[tuple[int, ...]],
    local_out: list[tuple[int, ...]],
) -> None:
    view = view_of(function, *(torch.ones(shape) for shape in shapes))
    op, args, kwargs = localise(view, local_out, local_in)
    fed = dict(zip(view.node.ins, (torch.ones(s) for s in local_in), strict=True))
    out = op(*(fed[a] if isinstance(a, Ref) else a for a in args), **kwargs)
    outs = out if isinstance(out, tuple) else (out,)
    assert [tuple(x.shape) for x in outs] == local_out


def test_ops_on_whole_tensors_stay_literal() -> None:
    for function in (lambda a: a.mean(-1), lambda a: a.squeeze(1), lambda a: a[:, :, 2:]):
        view = view_of(function, torch.ones(4, 1, 6))
        assert localise(view, view.out_shapes, view.in_shapes)[0] is view.node.op


def test_a_mean_of_shards_divides_by_the_global_count() -> None:
    view = view_of(lambda a: a.mean(-1, keepdim=True), torch.ones(4, 7))
    op, args, kwargs = localise(view, [(4, 1)], [(4, 4)])
    out = op(torch.ones(4, 4), *args[1:], **kwargs)
    torch.testing.assert_close(out, torch.full((4, 1), 4 / 7))


def test_large_nodes_are_shrunk_consistently_and_checked() -> None:
    nodes, values = record(lambda a: a.softmax(-1), torch.empty(2, 32, 4096, 4096, device="meta"))
    view = NodeView.of(nodes[-1], values, 2)
    small = shrink(view)
    assert small is not None and small.in_shapes == small.out_shapes
    assert math.prod(small.in_shapes[0]) <= 65536
    assert small.in_shapes[0][2] == small.in_shapes[0][3]
    assert check(view, Strategy((1,), (1,), "dtensor"))
    assert not check(view, Strategy((3,), (3,), "dtensor"))


def test_tensor_that_is_passed_twice_has_one_state() -> None:
    view = view_of(torch.mul, *[torch.ones(4, 6)] * 1, torch.ones(4, 6))
    twice = view_of(lambda a: a * a, torch.ones(4, 6))
    book = RuleBook.first_party()
    assert ("P", "R") in {r.ins for r in book.strategies(view)}
    assert ("P", "R") not in {r.ins for r in book.strategies(twice)}


def test_rows_of_plugins_are_checked_before_use() -> None:
    def greedy(view: NodeView) -> Iterator[Row]:
        for dim in range(len(view.in_shapes[0])):
            yield (dim,), (dim,)
        yield ("P",), ("P",)

    rules = {
        **book_module.first_party_rules(),
        "aten.softplus": RuleEntry(greedy, "plugin"),
        "aten._softmax": RuleEntry(greedy, "plugin"),
    }
    book = RuleBook(rules)
    rows = {r.ins for r in book.strategies(view_of(F.softplus, torch.ones(4, 6)))}
    assert rows == {("R",), (0,), (1,)}
    rows = {r.ins for r in book.strategies(view_of(lambda a: a.softmax(-1), torch.ones(4, 6)))}
    assert rows == {("R",), (0,)}


def test_an_op_without_a_rule_is_replicated() -> None:
    rules = book_module.first_party_rules()
    del rules["aten.cumsum"]
    view = view_of(lambda a: a.cumsum(-1), torch.ones(4, 6))
    assert RuleBook(rules).strategies(view)[1:] == []


@pytest.mark.parametrize("row", [(("R", 2, "R"), (1,)), ((1, 1, "R"), ("P",))])
def test_grouped_products(row: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    """_grouped_mm takes no float64, so its rows are compared here in float32."""
    x, w = torch.randn(6, 16), torch.randn(3, 16, 24)
    offsets = torch.tensor([2, 5, 6], dtype=torch.int32)
    product = torch.ops.aten._grouped_mm
    view = view_of(product, x, w, offsets)
    assert row in {(r.ins, r.outs) for r in RuleBook.first_party().strategies(view)}
    whole = product(x, w, offsets)
    cut = lambda t, s, k: t.chunk(2, s)[k].contiguous() if isinstance(s, int) else t  # noqa: E731
    parts = [product(*(cut(t, s, k) for t, s in zip((x, w, offsets), row[0], strict=True))) for k in range(2)]
    joined = torch.cat(parts, 1) if row[1] == (1,) else parts[0] + parts[1]
    torch.testing.assert_close(joined, whole)


def test_rows_are_cached_by_shapes_and_arguments() -> None:
    calls = []

    def counted(view: NodeView) -> Iterator[Row]:
        calls.append(view.in_shapes)
        yield (0,), (0,)

    book = RuleBook({"aten.tanh": RuleEntry(counted, "hand")})
    for _ in range(2):
        for n in (2, 3):
            book.strategies(view_of(torch.tanh, torch.ones(6, 2), n=n))
    assert len(calls) == 2


def doubled(view: NodeView) -> Iterator[Row]:
    """The rule of a plugin, with one wrong row."""
    yield (0,), (0,)
    yield (1,), ("P",)


DOUBLED = {"aten.erfinv": doubled}
NONSENSE = 3


class Plugins:
    """Stands for the plugins found: one record with the given target."""

    def __init__(self, target: str) -> None:
        self._target = target

    def op_rules(self) -> dict[str, Any]:
        """As PluginHost gives it."""
        spec = OpRuleSpec(name="acme", target=f"{__name__}:{self._target}", summary="")
        return {"acme": spec}


def test_plugins_add_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "discover", lambda: Plugins("DOUBLED"))
    rows = RuleBook.default().strategies(view_of(torch.erfinv, torch.ones(4, 6)))
    assert {(r.ins, r.source) for r in rows} == {(("R",), "replicate"), ((0,), "plugin")}


def test_plugin_target_that_is_no_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "discover", lambda: Plugins("NONSENSE"))
    with pytest.raises(PluginError, match=r"acme.*int.*mapping of op names"):
        RuleBook.default()


def test_a_rule_with_an_unknown_source_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"rule of aten.tan has source 'indexing'; it must be one of einsum, factory"
    ):
        RuleBook({"aten.tan": RuleEntry(lambda view: [], "indexing")})
