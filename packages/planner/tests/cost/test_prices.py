"""Costs of conversions between the four states, links, operations, and what autograd keeps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from operations import kept
from planner_models import HOST, Mlp, Transformer, tokens
from torch import nn

from meshwright_dtensor.cluster import Cluster, LinkLevel
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.sharding.states import State
from meshwright_planner.clusters.registry import DGX_A100, DGX_H100, LAPTOP_CPU, cluster_of
from meshwright_planner.cost.backward import BackwardTraffics
from meshwright_planner.cost.prices import (
    AxisCosts,
    backward_move,
    convertible,
    forward_move,
    inner_dim,
    work_of,
)
from meshwright_planner.memory.module_work import module_work
from meshwright_planner.memory.peak import Replay
from meshwright_planner.placement.legal_rows import Legality
from meshwright_planner.placement.problem import PlacementProblem
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record

# (source, target) -> collective of the forward pass, of the backward pass
EXPECTED = {
    ("I", "X"): (None, "all_reduce"),
    ("X", "I"): (None, None),
    ("P", "I"): ("all_reduce", None),
    ("P", "X"): ("all_reduce", "all_reduce"),
    ("P", 0): ("reduce_scatter", "all_gather"),
    (0, "I"): ("all_gather", None),
    (0, "X"): ("all_gather", "reduce_scatter"),
    (0, 1): ("all_to_all", "all_to_all"),
    ("I", 0): (None, "all_gather"),
    ("X", 0): (None, None),
    ("I", "P"): (None, None),
    ("X", "P"): (None, None),
}


def test_conversions_of_the_four_states() -> None:
    for (source, target), kinds in EXPECTED.items():
        moves = (forward_move(source, target, 8), backward_move(source, target, 8))
        assert tuple(m and m.kind for m in moves) == kinds, (source, target)
        assert convertible(source, target)
    for state in ("I", "X", "P", 0):
        assert forward_move(state, state, 8) is None and backward_move(state, state, 8) is None
    assert not convertible(0, "P")
    covered = {*EXPECTED, (1, 0)} | {(s, s) for s in ("I", "X", "P", 0)} | {(0, "P")}
    assert covered >= set(product(("I", "X", "P", 0), repeat=2))


def test_the_link_of_an_axis() -> None:
    h100 = DGX_H100
    assert h100.link(1, 8).name == "nvlink" and h100.link(8, 4).name == "infiniband"
    assert (
        h100.link(1, 16).bandwidth_Bps == 370.8e9
    )  # all eight cards of the node at once, more than its inner link
    assert h100.link(8, 4).bandwidth_Bps == 48.5e9  # one member a node
    assert h100.link(4, 4).bandwidth_Bps == 2 * 48.5e9
    assert LAPTOP_CPU.link(1, 512).name == "loopback"
    with pytest.raises(ValueError, match="no links"):
        Cluster("none", 1, 1, {"float32": 1.0}, 1.0, (), "").link(1, 2)
    flat = Cluster("flat", 1, 1, {"float32": 1.0}, 1.0, (LinkLevel("network", 0, 0.0, 10.0),), "")
    assert flat.link(1, 2).seconds("all_reduce", 100, 2) == pytest.approx(2 * 0.5 * 100 / 10)


def test_clusters_are_registered_with_their_source() -> None:
    for cluster in (DGX_A100, DGX_H100, LAPTOP_CPU):
        assert cluster.source and cluster.usable_bytes > 0
        assert cluster_of(cluster, HOST) is cluster
    assert DGX_H100.rate("bfloat16") > DGX_A100.rate("bfloat16") > DGX_A100.rate("float32")
    assert DGX_A100.rate("int8") == DGX_A100.rate("float32")


def test_a_large_product_is_bound_by_flops_and_a_norm_by_bytes() -> None:
    book = RuleBook.first_party()
    costs = AxisCosts(DGX_H100, DGX_H100.link(1, 8), 8)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.LayerNorm(4096)).bfloat16()
        batch = Batch.of(torch.empty(8192, 4096, dtype=torch.bfloat16))
    tape = record(model, batch, book.composites)
    product_, norm = tape.nodes
    flops = 2 * 8192 * 4096**2
    whole = costs.compute(
        work_of(product_, tape.values, tape.flows[0], flops), product_, tape.values, ("X", "X"), ("X",)
    )
    # the input gets no gradient; tiles and waves take a few percent
    assert 2 * flops / DGX_H100.rate("bfloat16") < whole < 2.1 * flops / DGX_H100.rate("bfloat16")
    split = costs.compute(
        work_of(product_, tape.values, tape.flows[0], flops), product_, tape.values, ("X", 0), (1,)
    )
    assert whole / 8 < split < 1.1 * whole / 8
    seconds = costs.compute(
        work_of(norm, tape.values, tape.flows[1], 0), norm, tape.values, ("I",) * 3, ("I",) * len(norm.outs)
    )
    nbytes = sum(tape.values[r.i].nbytes for r in (*norm.ins, *norm.outs))
    assert seconds == pytest.approx(3 * nbytes / (3.35e12 * 0.9))


def test_saved_bytes_equal_those_of_autograd() -> None:
    book = RuleBook.first_party()
    for model, batch in (
        (Transformer(layers=2, dropout=0.1), Batch.of(tokens())),
        (Mlp(), Batch.of(torch.randn(4, 7, 64))),
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softmax(-1), nn.ReLU()), Batch.of(torch.randn(3, 8))),
    ):
        tape = record(model, batch, book.composites)
        assert tape.activation_bytes == pytest.approx(kept(model, batch), rel=0.01), type(model)


def test_dead_code_is_dropped_and_gradients_flow_where_they_should() -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
            self.used.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.unused(x)
            return F.relu(self.used(x)).sum()

    tape = record(Wasteful(), Batch.of(torch.randn(2, 4)), RuleBook.first_party().composites)
    assert [n.name for n in tape.nodes] == ["linear", "aten.relu.default", "aten.sum.default"]
    assert tape.recorded == 4 and tape.scalar
    grad = {tape.values[r.i].name: tape.grad[r.i] for r in tape.nodes[0].ins}
    assert grad == {"input:0": False, "param:used.weight": True, "param:used.bias": False}


def test_gradient_of_a_bias_is_another_pass() -> None:
    """It is summed over the rows of the gradient of the outputs, which is read for it; a frozen bias needs none."""
    model, batch = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4)), Batch.of(torch.randn(64, 8))

    def moved() -> list[float | None]:
        tape = record(model, batch, RuleBook.first_party().composites)
        costs = AxisCosts(DGX_H100, DGX_H100.link(1, 1), 1)
        problem = PlacementProblem(Legality(tape, quotient(tape), RuleBook.first_party(), costs))
        backwards = BackwardTraffics(tape)
        works = [
            work_of(node, tape.values, tape.flows[k], problem.legality.flops(k), backwards.of(tape, k))
            for k, node in enumerate(tape.nodes)
        ]
        whole = [(["I"] * len(node.ins), ["I"] * len(node.outs)) for node in tape.nodes]
        pairs = zip(works, tape.nodes, whole, strict=True)
        return [costs._sized(work, node, tape.values, *states).backward_bytes for work, node, states in pairs]

    assert moved() == [4.0 * 64 * 32, 4.0 * 64 * 4]
    model[0].bias.requires_grad_(False)
    assert moved() == [0.0, 4.0 * 64 * 4]


def test_copied_blocks_have_the_work_of_run_blocks() -> None:
    book = RuleBook.first_party()
    tape = record(Transformer(), Batch.of(tokens()), book.composites)

    def work(merge: bool) -> list[tuple[object, ...]]:
        costs = AxisCosts(LAPTOP_CPU, LAPTOP_CPU.link(1, 1), 1)
        problem = PlacementProblem(Legality(tape, quotient(tape, merge), book, costs, {}, None), {})
        parts = module_work(Replay(problem, problem.replicated()))
        sources = (
            "module",
            "seconds",
            "saved_bytes",
            "parameters",
            "inputs",
            "shared",
            "deferred_bytes",
            "forward",
        )
        return [tuple(getattr(part, name) for name in sources) for part in parts]

    merged = work(merge=True)
    assert len(quotient(tape).nodes) < len(tape.nodes)
    assert merged == work(merge=False)
    assert len(merged) > 20 and all(part[1] for part in merged[1:-1])  # in the last, nothing is done


GATHERED = (16, 4096, 5120)
NBYTES = 2 * 16 * 4096 * 5120


@pytest.mark.parametrize(
    ("source", "target", "shape", "copies"),
    [
        (1, "X", GATHERED, 2),
        ("P", 1, GATHERED, 2),
        # the parts of ranks follow each other in memory
        (0, "X", GATHERED, 0),
        (1, "X", (1, 16 * 4096, 5120), 0),
        ("P", 0, GATHERED, 0),
        ("P", "I", GATHERED, 0),
        # before and after, of what one rank holds
        (1, 2, GATHERED, 4 / 8),
        (0, 2, GATHERED, 2 / 8),
    ],
)
def test_collectives_of_an_inner_dim_are_copied_too(
    source: State, target: State, shape: tuple[int, ...], copies: float
) -> None:
    """A gather or scatter along an inner dim reads and writes the whole tensor once more (comm/collectives.py)."""
    link = DGX_H100.link(1, 8)
    moved = forward_move(source, target, NBYTES, inner_dim(shape))
    assert moved is not None
    seconds = AxisCosts(DGX_H100, link, 8).collective(moved)
    copied = copies * NBYTES / DGX_H100.streams
    assert seconds == pytest.approx(link.seconds(moved.kind, NBYTES, 8) + copied)
    # another batch of one row has no inner dim
    row = moved.resized(NBYTES // 16, inner_dim((1, *shape[1:])))
    assert (row.copies > 0) == (2 in (source, target) and source != "P")


class Readers(nn.Module):
    """One value that `count` layers read."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def step_seconds(model: nn.Module, x: torch.Tensor, kinds: tuple[str, ...]) -> float:
    """Seconds of the operations of these kinds, forward and backward, on an H100."""
    tape = record(model, Batch.of(x), RuleBook.first_party().composites)
    costs, backwards, total = AxisCosts(DGX_H100, DGX_H100.link(1, 1), 1), BackwardTraffics(tape), 0.0
    for index, node in enumerate(tape.nodes):
        flops = 2 * 8192 * 4096**2 if node.name == "linear" else 0
        work = work_of(node, tape.values, tape.flows[index], flops, backwards.of(tape, index))
        if work.kind in kinds:
            states = [("I",) * len(refs) for refs in (node.ins, node.outs)]
            total += costs.compute(work, node, tape.values, *states)
    return total


def test_gradients_of_several_products_are_summed() -> None:
    """Of three products of one value the second and the third gradient are added: two reads and a write each."""
    with torch.device("meta"):
        single, three = Readers(1).bfloat16(), Readers(3).bfloat16()
        x = torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True)
    more = step_seconds(three, x, ("matmul",)) - 3 * step_seconds(single, x, ("matmul",))
    assert more == pytest.approx(2 * 3 * 2 * 8192 * 4096 / DGX_H100.streams, rel=1e-6)


class Cut(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        if self.name == "half":
            return x[:, :2048].exp()
        if self.name == "split":
            low, high = x.split(2048, 1)
            return low.exp() * high
        return x.view(4096, 8192).exp()


@pytest.mark.parametrize(("name", "passes"), [("half", 2.0), ("split", 2.0), ("view", 0.0)])
def test_backward_of_views(name: str, passes: float) -> None:
    """The gradient of a half is copied (read, write) into zeros; those of both halves are joined; a view has none."""
    with torch.device("meta"):
        x = torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True)
    seconds = step_seconds(Cut(name), x, ("view",))
    assert seconds == pytest.approx(max(10e-6, passes * 2 * 8192 * 4096 / DGX_H100.streams), rel=1e-6)
