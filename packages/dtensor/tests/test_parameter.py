"""Mesh parameters: DTensors for optimizers and tools, global values for computation."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright_dtensor.api import as_mesh_parameter, distribute
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.utils.process import settle


def mesh_of(world):
    return init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))


def over(value, mesh, state, requires_grad=True):
    placement = Shard(state) if isinstance(state, int) else Replicate()
    return as_mesh_parameter(distribute_tensor(value.detach(), mesh, [placement]), (state,), requires_grad)


def twins(mesh, dims=(7, 5)):
    """A two-layer model and its twin over the mesh: column, then row."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, dims[0]), nn.Tanh(), nn.Linear(dims[0], dims[1]))
    here = copy.deepcopy(plain)
    for layer, states in ((here[0], (0, 0)), (here[2], (1, "I"))):
        layer.weight = over(layer.weight, mesh, states[0])
        layer.bias = over(layer.bias, mesh, states[1])
    return plain, here


def close(actual, expected):
    actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
    torch.testing.assert_close(actual.detach(), expected.detach())


def case_optimizers(mesh):
    for make in (
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        lambda ps: torch.optim.AdamW(ps, 1e-3, eps=1e-3),
        lambda ps: torch.optim.AdamW(ps, 1e-3, eps=1e-3, foreach=True),
        lambda ps: torch.optim.Adagrad(ps, 0.1),
    ):
        plain, here = twins(mesh)
        a, b = make(plain.parameters()), make(here.parameters())
        for step in range(3):
            x = torch.randn(4, 6, generator=seeded(step))
            for model, optimizer, batch in ((plain, a, x), (here, b, distribute(x, mesh, ["I"]))):
                model(batch).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(plain.named_parameters(), here.parameters(), strict=True):
            assert isinstance(q, DTensor), name
            close(q, p)
        states = [
            s for state in b.state.values() for s in state.values() if isinstance(s, torch.Tensor) and s.dim()
        ]
        assert states and all(isinstance(s, DTensor) for s in states)


def case_gradients_accumulate_and_are_dtensors(mesh):
    plain, here = twins(mesh)
    x = torch.randn(4, 6)
    for _ in range(2):
        plain(x).sum().backward()
        here(x).sum().backward()  # a plain tensor is the global value
    for p, q in zip(plain.parameters(), here.parameters(), strict=True):
        assert isinstance(q.grad, DTensor) and q.grad.placements == q.placements
        close(q.grad, p.grad)
    here[0].weight.grad.mul_(2)
    close(here[0].weight.grad, plain[0].weight.grad * 2)
    here[0].weight.grad = here[0].weight.grad * 3
    close(here[0].weight.grad, plain[0].weight.grad * 6)
    here[0].weight.grad = torch.ones(7, 6)
    close(here[0].weight.grad, torch.ones(7, 6))
    here.zero_grad()
    assert all(q.grad is None for q in here.parameters())
    # a gradient in another layout is the same value
    here[0].weight.grad = distribute_tensor(torch.ones(7, 6), mesh, [Replicate()])
    close(here[0].weight.grad, torch.ones(7, 6))


def case_frozen_and_unused(mesh):
    plain, here = twins(mesh)
    extra = over(torch.randn(3), mesh, "I")
    for model in (plain, here):
        model[0].weight.requires_grad_(False)
        model(torch.ones(2, 6)).sum().backward()
    assert here[0].weight.grad is None and extra.grad is None
    close(here[2].weight.grad, plain[2].weight.grad)
    here[0].weight.requires_grad = True
    here(torch.ones(2, 6)).sum().backward()
    assert here[0].weight.grad is not None


def case_hooks(mesh):
    plain, here = twins(mesh)
    seen = []
    for model in (plain, here):
        model[0].weight.register_hook(lambda g: g * 2)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p)))
        model(torch.ones(2, 6)).sum().backward()
    close(here[0].weight.grad, plain[0].weight.grad)
    assert seen == [nn.Parameter, MeshParameter]


def case_hooks_let_go(mesh):
    """A parameter that nothing but its own hook could refer to is freed."""
    parameter = as_mesh_parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]), (0,))
    parameter.register_hook(lambda g: g)
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    (parameter * 2).sum().backward()
    seen = weakref.ref(parameter)
    del parameter
    # a gloo thread may hold a tensor of the collective that distributed the value
    settle()
    gc.collect()
    assert seen() is None


def case_computation_with_parameters_alone(mesh):
    """Penalties, tied transposes and norms of weights: no activation takes part."""
    plain, here = twins(mesh)

    def penalty(model):
        w, v = model[0].weight, model[2].weight
        return (w * w).sum() + (v @ w).tanh().sum() + w.T.cumsum(0).mean() + F.normalize(v, dim=1).sum()

    a, b = penalty(plain), penalty(here)
    assert isinstance(b, GlobalTensor)
    close(b, a)
    a.backward()
    b.backward()
    for p, q in zip(plain.parameters(), here.parameters(), strict=True):
        if p.grad is not None:
            close(q.grad, p.grad)


def case_full_and_local_values_are_connected(mesh):
    plain, here = twins(mesh)
    (here[0].weight.full_tensor() ** 2).sum().backward()
    (plain[0].weight ** 2).sum().backward()
    close(here[0].weight.grad, plain[0].weight.grad)
    here.zero_grad()
    (here[0].weight.to_local() ** 2).sum().backward()
    close(here[0].weight.grad, plain[0].weight.grad)
    with pytest.raises(UnsupportedError, match=r"full_tensor\(\)"):
        (here[0].weight.redistribute(mesh, [Replicate()]).to_local() ** 2).sum().backward()


def case_state_dict(mesh):
    plain, here = twins(mesh)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(1)
    here.load_state_dict(plain.state_dict())  # one device's values
    for (name, p), (_, value) in zip(plain.named_parameters(), here.state_dict().items(), strict=True):
        assert isinstance(value, DTensor), name
        close(value, p)
    with pytest.raises(UnsupportedError, match=r"its part only.*full_state_dict"):
        torch.save(here.state_dict(), io.BytesIO())
    _, other = twins(mesh)
    other.load_state_dict(here.state_dict())
    close(other[2].weight, plain[2].weight)


def case_deepcopy(mesh):
    plain, here = twins(mesh)
    here(torch.ones(2, 6)).sum().backward()
    twin = copy.deepcopy(here)
    assert type(twin[0].weight) is MeshParameter and twin[0].weight is not here[0].weight
    with torch.no_grad():
        twin[0].weight.mul_(0)
    close(here[0].weight, plain[0].weight)
    twin(torch.ones(2, 6)).sum().backward()
    assert twin[2].weight.grad is not None


def case_init_functions_draw_as_on_one_device(mesh):
    plain, here = twins(mesh)
    for f in (nn.init.normal_, nn.init.xavier_uniform_, nn.init.trunc_normal_, nn.init.zeros_, nn.init.ones_):
        torch.manual_seed(9)
        f(plain[0].weight)
        torch.manual_seed(9)
        f(here[0].weight)
        assert torch.equal(here[0].weight.full_tensor(), plain[0].weight), f


def case_buffers_stay_plain(mesh):
    buffer = torch.zeros(5)
    x = distribute(torch.arange(10.0).view(2, 5), mesh, [0])
    buffer += x.sum(0)
    assert type(buffer) is torch.Tensor
    close(buffer, torch.arange(10.0).view(2, 5).sum(0))
    buffer.mul_(0.9).add_(x.mean(0), alpha=0.1)
    assert type(buffer) is torch.Tensor


def case_wrong_placements(mesh):
    with pytest.raises(UnsupportedError, match="should be"):
        as_mesh_parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]), (1,))


CASES = {name.removeprefix("case_"): f for name, f in list(globals().items()) if name.startswith("case_")}


def run(rank, world, name):
    torch.manual_seed(0)
    CASES[name](mesh_of(world))
    return True


@pytest.mark.parametrize("name", list(CASES))
def test_parameter(rank_pool: RankPool, name: str):
    assert all(rank_pool.run(2, run, name))
