"""Every row of every composite on real ranks, on one axis and on two at once: results, gradients, masks, random state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composite_cases import CASES, Call, D, floats, logits_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright_dtensor.rules import Composite, LocalContext, NodeView, RuleBook, Strategy
from meshwright_dtensor.sharding.boxes import slice_of
from meshwright_dtensor.testing.on_device import device_type, random_state, seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.graph import Node, Recorder, Value

EXACT = ("dropout",)


def constants(node: Node) -> tuple[int, ...]:
    """Inputs that take no gradient: class weights and running statistics."""
    if node.name == "cross_entropy" and len(node.ins) == 3:
        return (2,)
    return (1, 2) if node.name == "batch_norm" and node.args[1] is not None else ()


class Axes:
    """States of one call on all mesh axes, from one row per axis."""

    def __init__(self, mesh: DeviceMesh, rows: tuple[Strategy, ...]) -> None:
        self.mesh, self.rows = mesh, rows

    def ins(self, k: int) -> tuple[Any, ...]:
        """States of input k."""
        return tuple(row.ins[k] for row in self.rows)

    def outs(self, k: int) -> tuple[Any, ...]:
        """States of output k."""
        return tuple(row.outs[k] for row in self.rows)

    def cut(
        self, ctx: LocalContext, whole: torch.Tensor, states: tuple[Any, ...], noisy: bool
    ) -> torch.Tensor:
        """This rank's local of ``whole``; on partial axes the ranks' locals sum to it."""
        if noisy and whole.is_floating_point():
            for axis, state in enumerate(states):
                if state == "P":
                    drawn = torch.randn(whole.shape, dtype=D, generator=seeded(5))
                    noise = torch.empty_like(whole).copy_(drawn)
                    whole = whole - noise if ctx.rank(axis) == 0 else noise
        return slice_of(whole, ctx.box(tuple(whole.shape), states)).clone(memory_format=torch.preserve_format)

    def check(
        self,
        ctx: LocalContext,
        result: torch.Tensor,
        whole: torch.Tensor,
        states: tuple[Any, ...],
        exact: bool,
    ) -> None:
        """``result`` in ``states`` stands for ``whole``."""
        result = result.detach().clone(memory_format=torch.contiguous_format)
        for axis, state in enumerate(states):
            if state == "P":
                dist.all_reduce(result, group=ctx.group(axis))
        expected = slice_of(whole, ctx.box(tuple(whole.shape), states))
        assert result.dtype == expected.dtype
        if exact:
            assert torch.equal(result, expected)
        else:
            torch.testing.assert_close(result, expected, equal_nan=True)


def legal(
    composite: Composite, node: Node, values: list[Value], sizes: list[int]
) -> list[tuple[Strategy, ...]]:
    """One legal row per axis, outermost first, in every combination."""
    result: list[tuple[Strategy, ...]] = [()]
    for axis, n in enumerate(sizes):
        longer = []
        for rows in result:
            shapes = {}
            for refs, kind in ((node.ins, "ins"), (node.outs, "outs")):
                for k, ref in enumerate(refs):
                    shape = list(values[ref.i].shape)
                    for row, size in zip(rows, sizes[:axis], strict=True):
                        state = getattr(row, kind)[k]
                        if isinstance(state, int):
                            shape[state] = -(-shape[state] // size)
                    shapes[ref] = tuple(shape)
            dtypes = {ref: values[ref.i].dtype for ref in shapes}
            view = NodeView.with_shapes(node, shapes, dtypes, n)
            longer += [(*rows, row) for row in composite.strategies(view)]
        result = longer
    return result


def last_node(call: Call, tensors: list[torch.Tensor], book: RuleBook) -> tuple[Node, list[Value]]:
    recorder = Recorder(book.composites, tensors)
    with recorder, torch.no_grad():
        call(*(x.clone(memory_format=torch.preserve_format) for x in tensors))
    return recorder.nodes[-1], recorder.values


def memory_order(x: torch.Tensor) -> list[int]:
    """Dims of more than one element, by stride."""
    return sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -x.stride(d))


def run_case(
    rank: int, world_size: int, name: str, sizes: list[int], transposed: bool = False
) -> tuple[int, list[str]]:
    """All combinations of rows on a mesh; (how many, which kinds of rows). `transposed`: inputs in another memory order."""
    mesh = init_device_mesh(device_type(), tuple(sizes))
    book = RuleBook.first_party()
    call, make = CASES[name]
    torch.manual_seed(3)
    inputs = make()
    if transposed:
        inputs = [x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x for x in inputs]
    node, values = last_node(call, inputs, book)
    composite = book.composite(node.name)
    shapes = tuple(values[r.i].shape for r in node.ins), tuple(values[r.i].shape for r in node.outs)
    exact = name.startswith(EXACT)
    count, kinds = 0, set()
    for rows in legal(composite, node, values, sizes):
        if uneven(rows, shapes, sizes):
            continue
        axes = Axes(mesh, rows)
        ctx = LocalContext(
            mesh,
            node,
            tuple(axes.ins(k) for k in range(len(node.ins))),
            tuple(axes.outs(k) for k in range(len(node.outs))),
            *shapes,
        )
        compare(axes, ctx, composite, call, inputs, exact)
        count += 1
        kinds |= {f"{r.ins}->{r.outs}" for r in rows}
    return count, sorted(kinds)


def uneven(rows: tuple[Strategy, ...], shapes: Any, sizes: list[int]) -> bool:
    """Whether two axes cut one dim that they do not divide: a later rank could hold nothing."""
    for kind, group in zip(("ins", "outs"), shapes, strict=True):
        for k, shape in enumerate(group):
            states = [getattr(row, kind)[k] for row in rows]
            for dim in {s for s in states if isinstance(s, int)}:
                parts = math.prod(n for n, s in zip(sizes, states, strict=True) if s == dim)
                if states.count(dim) > 1 and shape[dim] % parts:
                    return True
    return False


def compare(
    axes: Axes, ctx: LocalContext, composite: Composite, call: Call, inputs: list[torch.Tensor], exact: bool
) -> None:
    """Forward and dual backward of one combination."""
    fixed = constants(ctx.node)
    grads_of = [x.is_floating_point() and k not in fixed for k, x in enumerate(inputs)]
    whole = [
        x.clone(memory_format=torch.preserve_format).requires_grad_(g)
        for x, g in zip(inputs, grads_of, strict=True)
    ]
    torch.manual_seed(11)
    expected = call(*whole)
    state_after = random_state()
    gradient = torch.randn(expected.shape, dtype=D, generator=seeded(1)).to(expected.dtype)
    wanted = [k for k, x in enumerate(whole) if x.requires_grad]
    expected_grads = torch.autograd.grad(expected, [whole[k] for k in wanted], gradient)
    local = [axes.cut(ctx, x, axes.ins(k), True).requires_grad_(grads_of[k]) for k, x in enumerate(inputs)]
    torch.manual_seed(11)
    given = [x * 1.0 for x in local] if ctx.node.name == "dropout" and ctx.node.args[3] else local
    result = composite.local(ctx)(given)
    assert torch.equal(random_state(), state_after)
    for k in fixed:  # running statistics are updated in place
        axes.check(ctx, local[k], whole[k].detach(), axes.ins(k), False)
    # random numbers are drawn in memory order
    there = [d for d in memory_order(expected) if result.shape[d] > 1]
    assert memory_order(result) == there, (ctx.ins, result.stride(), expected.stride())
    partial = any("P" in states for states in ctx.ins)
    axes.check(ctx, result, expected.detach(), axes.outs(0), exact and not partial)
    if composite.plain(ctx) and not exact:
        torch.manual_seed(11)
        torch.testing.assert_close(call(*local), result, rtol=0, atol=0, equal_nan=True)
    local_gradient = slice_of(gradient, ctx.box(tuple(gradient.shape), axes.outs(0)))
    grads = torch.autograd.grad(result, [local[k] for k in wanted], local_gradient)
    for k, grad, expected_grad in zip(wanted, grads, expected_grads, strict=True):
        axes.check(ctx, grad, expected_grad, tuple(dual(row, k) for row in axes.rows), exact and not partial)


def dual(row: Strategy, k: int) -> Any:
    """The state of the gradient of input k on the axis of ``row``."""
    state = row.ins[k]
    if isinstance(state, int):
        return state
    return "R" if state == "P" or all(s == "R" for s in row.ins + row.outs) else "P"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_composite_rows_on_one_axis(name: str, rank_pool: RankPool) -> None:
    # losses give numbers, or rows of them
    for transposed in (False,) if name.startswith("ce") else (False, True):
        count, _ = rank_pool.run(2, run_case, name, [2], transposed)[0]
        assert count > 1 or name == "ce one row"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["linear", "sdpa gqa", "sdpa dropout", "embedding", "ce ignore", "ce spatial", "ce none", "dropout"],
)
def test_composite_rows_on_two_axes(name: str, rank_pool: RankPool) -> None:
    count, _ = rank_pool.run(4, run_case, name, [2, 2])[0]
    assert count > 4


EXPECTED = {
    "embedding padding": ["('R', 0)->('P',)", "('R', 1)->(2,)", "(1, 'R')->(1,)"],
    "ce": ["(0, 0)->('R',)", "(1, 'R')->('R',)"],
    "sdpa gqa": ["(1, 1, 1)->(1,)"],
    "sdpa mqa": ["(1, 'R', 'R')->(1,)"],
    "sdpa mask": ["(2, 'R', 'R', 2)->(2,)", "(0, 0, 0, 0)->(0,)"],
    "linear": ["(2, 1, 'P')->('P',)", "('R', 0, 0)->(2,)"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_expected_rows_are_there(name: str, rank_pool: RankPool) -> None:
    _, kinds = rank_pool.run(2, run_case, name, [2])[0]
    assert set(EXPECTED[name]) <= set(kinds)


def test_grouped_heads_that_do_not_divide_are_gathered(rank_pool: RankPool) -> None:
    _, kinds = rank_pool.run(2, run_case, "sdpa gqa indivisible", [2])[0]
    assert not any(kind.startswith("(1,") for kind in kinds)


def bad_index(rank: int, world_size: int, target: bool) -> str:
    mesh = init_device_mesh(device_type(), (world_size,))
    book = RuleBook.first_party()
    if target:
        call, good, bad = F.cross_entropy, logits_of((4, 8)), [*floats((4, 8)), torch.tensor([0, 1, 8, 2])]
        states: tuple[Any, ...] = ((1,), ("R",))
    else:
        call, good, bad = F.embedding, [torch.zeros(3, dtype=torch.long), *floats((8, 2))], None
        bad = [torch.tensor([1, 8, 2]), good[1]]
        states = (("R",), (0,))
    node, values = last_node(call, good, book)
    shapes = tuple(values[r.i].shape for r in node.ins), tuple(values[r.i].shape for r in node.outs)
    ctx = LocalContext(mesh, node, states, (("R",),), *shapes)
    local = [slice_of(x, ctx.box(tuple(x.shape), s)) for x, s in zip(bad, states, strict=True)]
    try:
        book.composite(node.name).local(ctx)(local)
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("target", [False, True])
def test_index_out_of_bounds_raises_on_every_rank(target: bool, rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, bad_index, target))


def recorded(rank: int, world_size: int) -> list[tuple[str, int, int, str]]:
    mesh = init_device_mesh(device_type(), (2, 2))
    book = RuleBook.first_party()
    node, values = last_node(F.cross_entropy, logits_of((8, 12)), book)
    log: list[tuple[str, int, int, str]] = []
    shapes = tuple(values[r.i].shape for r in node.ins), tuple(values[r.i].shape for r in node.outs)
    ctx = LocalContext(
        mesh, node, ((0, 1), (0, "R")), (("R", "R"),), *shapes, record=lambda *event: log.append(event)
    )
    local = [
        slice_of(x, ctx.box(tuple(x.shape), s)) for x, s in zip(logits_of((8, 12)), ctx.ins, strict=True)
    ]
    book.composite(node.name).local(ctx)(local)
    return log


@pytest.mark.slow
def test_communication_inside_of_composites_is_recorded(rank_pool: RankPool) -> None:
    log = rank_pool.run(4, recorded)[0]
    assert log == [
        ("all_reduce", 1, 4 * 8, "forward"),
        ("all_reduce", 1, 2 * 4 * 8, "forward"),
        ("all_reduce", 0, 2 * 8, "forward"),
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.embedding(torch.zeros(2, dtype=torch.long), torch.ones(3, 2), max_norm=1.0),
        lambda: F.cross_entropy(torch.ones(2, 3), torch.zeros(2, dtype=torch.long), size_average=True),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_unsupported_calls_are_left_to_the_ops(call: Callable[[], torch.Tensor]) -> None:
    book = RuleBook.first_party()
    recorder = Recorder(book.composites)
    with recorder, torch.no_grad():
        call()
    assert all(node.op is not None for node in recorder.nodes)
