"""Reductions along a sharded dim: only results are communicated, and values and gradients are those of one device."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.sharding.intervals import segmented_shard
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool

INF = float("inf")
REDUCTIONS = {
    "amax": lambda x: x.amax(1),
    "amin of two": lambda x: x.amin((0, 2), keepdim=True),
    "max": lambda x: x.max(),
    "min along": lambda x: tuple(x.min(1)),
    "max along": lambda x: tuple(x.max(-1, keepdim=True)),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(1, keepdim=True),
    "aminmax": lambda x: tuple(x.aminmax(dim=1)),
    "any": lambda x: (x > 1).any(1),
    "all": lambda x: (x > -2).all(),
    "prod": lambda x: x.prod(1),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "var": lambda x: x.var((0, 1)),
    "std": lambda x: x.std(),
    "std_mean": lambda x: torch.std_mean(x, 1, correction=0, keepdim=True),
    "norm": lambda x: x.norm(),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, (1, 2)),
    "norm 0": lambda x: torch.linalg.vector_norm(x.detach(), 0),
    "norm inf": lambda x: torch.linalg.vector_norm(x, INF, 1),
    "norm -inf": lambda x: x.norm(-INF),
}
SHAPE = (4, 7, 6)
OF_KIND = {
    "tied": REDUCTIONS,
    "zero": ("norm", "std", "prod"),
    "nan": ("amax", "max", "max along", "argmax", "norm inf"),
}
"""Kind of the values -> the reductions that are tried."""
ON_A_GRID = ("amin of two", "max", "max along", "std_mean", "norm 3")


def values(kind):
    """A few numbers, so that many are extreme; none but 0; one that is no number."""
    x = torch.randn(SHAPE, generator=seeded(3), dtype=torch.float64)
    if kind == "tied":
        return x.round().clamp(-1, 1)
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "nan":
        x[1, 5, 2] = float("nan")
    return x


def close(a, b):
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)


def differences(rank, world, sizes, layouts, kinds):
    """What differs from one device in each of these states, and the most bytes that a full reduction gathers."""
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    failures, largest = [], 0
    for states, kind in itertools.product(layouts, kinds):
        for name in OF_KIND[kind] if len(sizes) == 1 else ON_A_GRID:
            function = REDUCTIONS[name]
            plain = values(kind).requires_grad_()
            here = distribute(plain.detach(), mesh, states).requires_grad_()
            with communication() as log:
                actual = function(here)
            events = [e.nbytes for e in log.events if e.kind in ("all_gather", "all_to_all")]
            largest = max([largest, *(events if name in ("max", "std", "norm") else ())])
            expected = function(plain)
            pairs = list(zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, expected)), strict=True))
            if not all(close(a.full_tensor(), b) for a, b in pairs):
                failures.append((name, kind, states, "value"))
            if not pairs[0][1].requires_grad:
                continue
            # of the first result, and of a sum of squares of the gradient
            for a, x in ((pairs[0][0], here), (pairs[0][1], plain)):
                (gradient,) = torch.autograd.grad((a * a).sum(), x, create_graph=True)
                gradient.square().sum().backward()
                x.gradient = gradient
            whole = here.gradient.full_tensor(), here.grad.full_tensor()
            if not all(map(close, whole, (plain.gradient, plain.grad))):
                failures.append((name, kind, states, "gradient"))
    return failures, largest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "layouts", "kinds"),
    [
        ((2,), [(1,)], ("tied", "zero", "nan")),
        ((2,), [(segmented_shard(2, (2, 4), 2),)], ("tied",)),
        ((2, 2), [(0, 1), (0, 0), (2, 0)], ("tied",)),
    ],
    ids=str,
)
def test_reductions_are_those_of_one_device(rank_pool: RankPool, sizes, layouts, kinds) -> None:
    world = math.prod(sizes)
    for failures, largest in rank_pool.run(world, differences, sizes, layouts, kinds):
        assert not failures, failures
        assert largest <= 24 * world, "results of all ranks, not the tensor"
