"""Conversions: value and gradient survive every change of layout, uneven and nested shards included."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import STATES, convertible, legal, run_many
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm import log as log_module
from meshwright_dtensor.comm.collectives import Step
from meshwright_dtensor.comm.redistribute import route
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.sharding.states import is_shard
from meshwright_dtensor.tensor.global_tensor import local_in, wrap
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


@pytest.mark.slow
def test_conversion_between_all_states_on_one_axis(rank_pool: RankPool):
    for n in (2, 3):
        cases = [
            (shape, (a,), (b,))
            for shape in ((4, 6, 6), (5, 7, 4), (3, 1, 9))
            for a, b in itertools.product(STATES, STATES)
            if convertible(a, b) and legal(shape, (a,), (n,)) and legal(shape, (b,), (n,))
        ]
        assert len(cases) > 60
        assert all(rank_pool.run(n, run_many, (n,), cases))


states = st.sampled_from(STATES)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.lists(
        st.tuples(
            st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(1, 5)),
            st.tuples(states, states),
            st.tuples(states, states),
        ),
        min_size=8,
        max_size=8,
    )
)
def test_conversion_between_states_on_two_axes(rank_pool: RankPool, raw):
    cases = [
        (shape, a, b)
        for shape, a, b in raw
        if legal(shape, a, (2, 2))
        and legal(shape, b, (2, 2))
        and all(convertible(s, t) for s, t in zip(a, b, strict=True))
        and a.count("P") < 2
    ]
    assert all(rank_pool.run(4, run_many, (2, 2), cases))


@given(st.tuples(states, states, states), st.tuples(states, states, states))
def test_route_reaches_target_and_moves_outer_shards_last(a, b):
    current = list(a)
    for axis, before, after in route(a, b):
        assert current[axis] == before
        touched = {s for s in (before, after) if is_shard(s)}
        assert not any(current[j] in touched for j in range(axis + 1, len(a))), (a, b)
        current[axis] = after
    assert tuple(current) == b


def count_collectives(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x = torch.randn(4, 6)
    actual = {}
    for name, source, target in (
        ("alias", "I", "X"),
        ("gather", 0, "I"),
        ("gather_scatter", 0, "X"),
        ("scatter", "I", 1),
        ("transpose", 0, 1),
    ):
        g = distribute(x, mesh, [source]).requires_grad_()
        with log_module.communication() as log:
            y = local_in(g, (target,))
            again = local_in(g, (target,))
            (y.sum() + again.sum()).backward()
        actual[name] = [(e.kind, e.phase, e.nbytes) for e in log.events]
    return actual


@pytest.mark.slow
def test_collectives_follow_gradient_rule_and_are_shared(rank_pool: RankPool):
    size = 4 * 6 * 4
    for actual in rank_pool.run(2, count_collectives):
        assert actual == {
            "alias": [("all_reduce", "backward", size)],  # two consumers, one reduction
            "gather": [("all_gather", "forward", size)],
            "gather_scatter": [("all_gather", "forward", size), ("reduce_scatter", "backward", size)],
            "scatter": [
                ("all_gather", "backward", size),
                ("all_gather", "backward", size),
            ],  # slices are not kept
            "transpose": [("all_to_all", "forward", size), ("all_to_all", "backward", size)],
        }


def partial_once(rank, world):
    """A Partial that both a replicated and a partial-gradient consumer read is reduced once."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    context = MeshContext.of(mesh)
    x = wrap(torch.randn(3, 4).requires_grad_(), layout_of(context, ("P",), (3, 4), torch.float32))
    with log_module.communication() as log:
        local_in(x, ("I",))
        local_in(x, ("X",))
        local_in(x, ("X",))
    return [e.kind for e in log.events]


def test_partial_is_reduced_once_for_all_readers(rank_pool: RankPool):
    assert rank_pool.run(2, partial_once) == [["all_reduce"]] * 2


class Copies(TorchDispatchMode):
    """The bytes of tensors that operations make by copying."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone):
            self.nbytes += made.nbytes
        return made


def _copied(rank: int, size: int, shape: tuple[int, ...], source, target) -> int:
    mesh = init_device_mesh(device_type(), (size,), mesh_dim_names=("tp",))
    total, total_target = (shape[d] if isinstance(d, int) else 0 for d in (source, target))
    run = Step(MeshContext.of(mesh), 0, source, target, total, total_target).function("forward")
    assert run is not None
    local = list(shape)
    if isinstance(source, int):
        local[source] //= size
    value = torch.ones(local)
    with Copies() as copies:
        run(value, log_module.NOWHERE)
    return copies.nbytes


@pytest.mark.parametrize(
    ("shape", "source", "target", "times"),
    [((4, 6, 8), "P", 1, 1), ((4, 6, 8), "P", 0, 0), ((1, 6, 8), "P", 1, 0), ((4, 6, 8), 1, "R", 1), ((4, 6, 8), 1, 2, 1)],
)  # fmt: skip
def test_a_collective_copies_what_is_strided_once(rank_pool: RankPool, shape, source, target, times):
    """As the planner costs it; an all-to-all copies the half of a rank before and after."""
    whole = 4 * math.prod(shape)
    assert rank_pool.run(2, _copied, shape, source, target) == [times * whole] * 2


def _expanded(rank: int, size: int) -> list[bool]:
    """Values without memory of their own, as the gradients of a sum are, through each collective."""
    mesh = init_device_mesh(device_type(), (size,), mesh_dim_names=("tp",))
    context, equal = MeshContext.of(mesh), []
    for source, target in itertools.product((0, 1, "P"), (0, 1, "R")):
        if source != target:
            totals = (4 if isinstance(state, int) else 0 for state in (source, target))
            run = Step(context, 0, source, target, *totals).function("forward")
            assert run is not None
            local = torch.full((1, 1), 2.0).expand([4 // size if dim == source else 4 for dim in (0, 1)])
            expected = [4 // size if dim == target else 4 for dim in (0, 1)]
            made = run(local, log_module.NOWHERE)
            equal.append(torch.equal(made, torch.full(expected, 2.0 * size if source == "P" else 2.0)))
    return equal


def test_expanded_values_are_sent(rank_pool: RankPool):
    assert rank_pool.run(2, _expanded) == [[True] * 7] * 2
