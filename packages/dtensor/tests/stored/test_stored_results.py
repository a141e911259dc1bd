"""Results of functions on stored values (parameters, gradients, states) are the global ones, as those of activations are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from meshwright_dtensor.api import as_mesh_parameter, distribute
from meshwright_dtensor.sharding.intervals import interval_shard
from meshwright_dtensor.stored.mesh_value import MeshValue, mesh_value
from meshwright_dtensor.stored.permuted import like_parameter
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool

# name -> function of a matrix [8, 6]; each with several results, with a result that is no tensor, or both
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "aminmax": lambda g: torch.aminmax(g),
    "max": lambda g: g.max(1),
    "max of max": lambda g: g.abs().max(1).values.max(),
    "min": lambda g: torch.min(g, 0),
    "topk": lambda g: torch.topk(g, 3, dim=0),
    "sort": lambda g: torch.sort(g, 0),
    "median": lambda g: g.median(0),
    "kthvalue": lambda g: g.kthvalue(2, 1),
    "mode": lambda g: g.round(decimals=1).mode(0),
    "cummax": lambda g: g.cummax(0),
    "std_mean": lambda g: torch.std_mean(g),
    "var_mean": lambda g: torch.var_mean(g, 0),
    "frexp": lambda g: torch.frexp(g),
    "meshgrid": lambda g: torch.meshgrid(g[:, 0], g[0], indexing="ij"),
    "broadcast_tensors": lambda g: torch.broadcast_tensors(g, g[0]),
    "atleast_3d": lambda g: torch.atleast_3d(g, g[0]),
    "unbind": lambda g: g.unbind(0),
    "split": lambda g: g.split(3),
    "svd": lambda g: torch.linalg.svd(g).S,
    "lstsq": lambda g: torch.linalg.lstsq(g, g).solution,
    "where": lambda g: torch.where(g > 0),
    "nonzero": lambda g: (g > 0).nonzero(),
    "unique": lambda g: torch.unique(g.round(decimals=1)),
    "bincount": lambda g: torch.bincount((g > 0).flatten().long()),
    "histc": lambda g: torch.histc(g, 4),
    "quantile": lambda g: g.quantile(0.3),
    "tolist": lambda g: g.tolist(),
    "equal": lambda g: torch.equal(g, g),
    "allclose": lambda g: torch.allclose(g, g * 1.0),
    "format": lambda g: f"{g.norm():.3f}",
    "bool": lambda g: bool((g > 0).any()),
    "contains": lambda g: 0.5 in g,
    "item": lambda g: g.norm().item(),
    "json": lambda g: json.loads(json.dumps({"norm": float(g.norm())})),
}
KINDS = ["rows", "columns", "whole", "permuted", "rows parameter", "whole parameter"]
EXCHANGE: dict[str, dict[str, Callable[[Any], Any]]] = {
    "arrays": {"numpy": lambda g: g.numpy(), "asarray": lambda g: np.asarray(g)},
    "dlpack": {"dlpack": lambda g: torch.from_dlpack(g)},
}


def plain(value: Any) -> Any:
    """`value` with whole plain tensors; what a rank reads of a number, it reads with item()."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return value.item()
        return value.full_tensor().detach() if hasattr(value, "full_tensor") else value
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def results(rank: int, world: int, kind: str, functions: str) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    value = torch.randn(8, 6)
    if kind == "permuted":
        state = interval_shard(0, [[(0, 2), (6, 2)], [(2, 4)]])
        parameter = as_mesh_parameter(
            distribute_tensor(value[[0, 1, 6, 7, 2, 3, 4, 5]], mesh, [Shard(0)]), (state,)
        )
        stored: Any = like_parameter(value, parameter)
    else:
        placement = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}[kind.split()[0]]
        stored = mesh_value(distribute_tensor(value, mesh, [placement]))
        if kind.endswith("parameter"):
            stored = as_mesh_parameter(
                stored, ("I",) if placement.is_replicate() else (placement.dim,), False
            )
    for name, function in EXCHANGE.get(functions, FUNCTIONS).items():
        with torch.no_grad():
            expected, actual = function(value), function(stored)
        assert not any(
            type(x) is DTensor for x in (actual if isinstance(actual, (list, tuple)) else [actual])
        )
        try:
            if isinstance(expected, (str, bool)):
                assert actual == expected
            else:
                assert_close(plain(actual), plain(expected), rtol=1e-5, atol=1e-6)
        except AssertionError as error:
            raise AssertionError(f"{name} of {kind}: {error}") from None


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_stored_values_are_global(rank_pool: RankPool, kind: str) -> None:
    rank_pool.run(2, results, kind, "torch")


@pytest.mark.host("NumPy reads the host's memory")
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_stored_values_are_global(rank_pool: RankPool, kind: str) -> None:
    rank_pool.run(2, results, kind, "arrays")


def test_memory_of_stored_values_is_handed_over(rank_pool: RankPool) -> None:
    for kind in KINDS:
        rank_pool.run(2, results, kind, "dlpack")


def gradients(rank: int, world: int) -> None:
    """Hooks, torch.autograd.grad, second derivatives and assigned gradients of a sharded weight."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    value, x = torch.randn(8, 6), torch.randn(5, 6)
    leaf = value.clone().requires_grad_()
    weight = as_mesh_parameter(mesh_value(distribute_tensor(value, mesh, [Shard(0)])), (0,))

    def loss(w: Any, given: Any) -> Any:
        return (given @ w.t()).tanh().square().sum()

    given = distribute(x, mesh, ["I"])
    (expected,) = torch.autograd.grad(loss(leaf, x), [leaf])
    (actual,) = torch.autograd.grad(loss(weight, given), [weight])
    assert type(actual) is MeshValue
    assert actual.norm().item() == pytest.approx(expected.norm().item(), rel=1e-5)
    assert float(actual.abs().max(1).values.max()) == pytest.approx(float(expected.abs().max()), rel=1e-5)
    norms: list[float] = []
    handle = weight.register_hook(lambda g: norms.append(g.norm().item()) or g * 2)
    loss(weight, given).backward()
    handle.remove()
    assert norms[0] == pytest.approx(expected.norm().item(), rel=1e-5)
    assert_close(weight.grad.full_tensor(), expected * 2)
    # a penalty on the gradient
    for w, batch in ((leaf, x), (weight, given)):
        w.grad = None
        (g,) = torch.autograd.grad(loss(w, batch), [w], create_graph=True)
        (g.square().sum() + g.norm()).backward()
    assert_close(weight.grad.full_tensor(), leaf.grad, rtol=1e-4, atol=1e-5)
    # ... and of a backward pass that keeps its graph
    for w, batch in ((leaf, x), (weight, given)):
        w.grad = None
        loss(w, batch).backward(create_graph=True)
        kept, w.grad = w.grad, None
        kept.square().sum().backward()
    assert_close(weight.grad.full_tensor(), leaf.grad, rtol=1e-4, atol=1e-5)
    # gradients put together by hand, in another layout
    flat = torch.cat([weight.grad.flatten(), weight.grad.flatten()])
    weight.grad = flat[: value.numel()].view_as(weight)
    assert_close(weight.grad.full_tensor(), leaf.grad, rtol=1e-4, atol=1e-5)
    weight.grad = distribute(leaf.grad, mesh, ["I"])
    assert torch.equal(weight.grad.full_tensor(), leaf.grad)


def test_gradients_read_as_global_values(rank_pool: RankPool) -> None:
    rank_pool.run(2, gradients)
