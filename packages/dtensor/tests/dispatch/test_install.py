"""The ways past ``__torch_function__``: each works as on one device or raises with the reason and the way round."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.api import as_mesh_parameter, distribute, from_local
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool

WORLD = 2


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x**3 * weight).cumsum(0)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        g = g.flip(0).cumsum(0).flip(0)
        return g * 3 * x**2 * weight, (g * x**3).sum(0)


captured = Cube.apply


def setup(shape=(4, 6), state=0, grad=True):
    mesh = init_device_mesh(device_type(), (WORLD,), mesh_dim_names=("tp",))
    value = torch.randn(shape)
    return mesh, value.clone().requires_grad_(grad), distribute(value, mesh, [state]).requires_grad_(grad)


def same(actual, expected):
    actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
    torch.testing.assert_close(actual, expected)


def case_vmap(state):
    _, _, x = setup(state=state)
    with pytest.raises(UnsupportedError, match=r"functorch.*full_tensor"):
        torch.vmap(lambda row: row * 2)(x)
    whole = x.detach().full_tensor()
    same(
        torch.vmap(lambda row: row * x.detach()[0])(whole), whole * whole[0]
    )  # closed over: its whole value is used


def case_func_grad(state):
    _, _, x = setup(state=state)
    with pytest.raises(UnsupportedError, match=r"functorch.*full_tensor"):
        torch.func.grad(lambda v: (v * v).sum())(x)
    with pytest.raises(UnsupportedError, match="functorch"):
        torch.func.jvp(lambda v: v * v, (x,), (x,))


def case_compile(state):
    _, plain, x = setup(state=state)
    compiled = torch.compile(lambda v: (v * 2).sum(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"(?s)global tensor|GlobalTensor|torch\.compile"):
        compiled(x)
    loose = torch.compile(lambda v: F.gelu(v @ v.T).sum(), backend="eager")
    try:
        out = loose(x)
    except Exception as e:
        assert "global tensor" in str(e) or "GlobalTensor" in str(e), e
    else:
        same(out, F.gelu(plain @ plain.T).sum())


def case_pickle(state):
    _, _, x = setup(state=state)
    for attempt in (lambda: pickle.dumps(x), lambda: torch.save(x, io.BytesIO()), lambda: copy.copy(x)):
        if state == "I":
            # every rank has the whole value
            attempt()
            assert torch.equal(pickle.loads(pickle.dumps(x)), x.full_tensor())
            continue
        with pytest.raises(UnsupportedError, match=r"cannot be pickled.*full_tensor\(\)"):
            attempt()


def case_deepcopy(state):
    _, _, x = setup(state=state)
    y = copy.deepcopy(x)
    assert y is not x and y.requires_grad and y.global_layout is x.global_layout
    with torch.no_grad():
        y.mul_(2)
    same(y.detach(), x.detach().full_tensor() * 2)
    with pytest.raises(RuntimeError, match="Only leaf"):
        copy.deepcopy(x * 2)


def case_function(state):
    _, plain, x = setup(state=state)
    weight, here = torch.randn(6, requires_grad=True), None
    here = weight.detach().clone().requires_grad_()
    for apply in (Cube.apply, captured):
        plain.grad = weight.grad = here.grad = None
        x.grad = None
        expected, actual = apply(plain, weight), apply(x, here)
        same(actual, expected)
        (expected * 2).sum().backward()
        (actual * 2).sum().backward()
        same(x.grad, plain.grad)
        same(here.grad, weight.grad)


class Reversed(torch.autograd.Function):
    """Runs a module inside, saves its result and runs it again in the backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, layer):
        y = layer(x)
        ctx.layer = layer
        ctx.save_for_backward(x.detach(), y.detach())
        return y * 2

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        with torch.enable_grad():
            x.requires_grad = True
            again = ctx.layer(x)
            again.backward(g * 2)
        assert torch.equal(again.detach(), y)
        return x.grad, None


def case_function_with_parameters_inside(state):
    """The forward uses parameters that are no arguments; no gradient may get lost."""
    mesh, plain, x = setup(state=state)
    layer = nn.Linear(6, 6)
    twin = copy.deepcopy(layer)
    parameter = as_mesh_parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]), (0,))
    twin.weight = parameter
    for module, value in ((layer, plain), (twin, x)):
        (Reversed.apply(value * 3, module) ** 2).sum().backward()
    same(x.grad, plain.grad)
    same(parameter.grad, layer.weight.grad)


def case_checkpoint(state):
    mesh, plain, x = setup(state=state)
    layer = nn.Linear(6, 6)
    twin = copy.deepcopy(layer)
    for name in ("weight", "bias"):
        value = getattr(twin, name).data
        setattr(twin, name, as_mesh_parameter(distribute_tensor(value, mesh, [Shard(0)]), (0,)))
    for reentrant in (False, True):
        for tensor in (plain, x, *layer.parameters(), *twin.parameters()):
            tensor.grad = None
        torch.manual_seed(5)
        expected = checkpoint(lambda v: F.dropout(layer(v).relu(), 0.5), plain, use_reentrant=reentrant)
        (expected * expected).sum().backward()
        torch.manual_seed(5)
        actual = checkpoint(lambda v: F.dropout(twin(v).relu(), 0.5), x, use_reentrant=reentrant)
        (actual * actual).sum().backward()
        same(actual, expected)
        same(x.grad, plain.grad)
        same(twin.weight.grad, layer.weight.grad)
        same(twin.bias.grad, layer.bias.grad)


def case_out(state):
    mesh, plain, x = setup(state=state, grad=False)
    target = torch.empty(4, 6)
    assert torch.add(x, 1, out=target) is target
    same(target, plain + 1)
    for other in ("I", 0, 1):
        sharded = distribute(torch.zeros(4, 6), mesh, [other])
        assert torch.mul(x, x, out=sharded) is sharded
        same(sharded, plain * plain)
    with pytest.raises(UnsupportedError, match="does not fit"):
        torch.add(x, 1, out=torch.empty(3))


def case_view(state):
    _, plain, x = setup(state=state, grad=False)
    row = x[0]
    if state == 0:  # the row lives on one rank: it had to be gathered
        row.add_(1)
        row[1:3].mul_(2)
        plain[0].add_(1)
        plain[0][1:3].mul_(2)
        same(x, plain)
        # the view of the view has written to it
        same(row + 0, plain[0])
        x.mul_(3)
        with pytest.raises(UnsupportedError, match="modified in place after"):
            row + 0
        x[0] = 1.0
        plain.mul_(3)
        plain[0] = 1.0
        same(x, plain)
    else:
        row.add_(1)
        plain[0].add_(1)
        same(x, plain)
        same(row, plain[0])


def case_numpy(state):
    _, plain, x = setup(state=state, grad=False)
    assert np.array_equal(x.numpy(), plain.numpy())
    assert np.array_equal(np.asarray(x), plain.numpy())
    assert np.array_equal(np.asarray(x.tolist(), dtype=np.float32), plain.numpy())
    assert torch.equal(torch.from_dlpack(x), plain)
    for name in ("data_ptr", "untyped_storage", "storage_offset"):
        with pytest.raises(UnsupportedError, match=r"storage of a global tensor.*to_local"):
            getattr(x, name)()


def case_threads(state):
    _mesh, _plain, x = setup(state=state, grad=False)
    if state != "I":
        x = x.redistribute(["I"])  # no collectives: threads of different ranks would interleave them
    results, errors = [], []
    flash = torch.backends.cuda.flash_sdp_enabled()

    def work():
        try:
            results.extend((x * i).sum(0) for i in range(200))
        except Exception as e:  # reported below, on the main thread
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.backends.cuda.flash_sdp_enabled() == flash, "tracing did not restore the attention kernels"
    assert len(results) == 800 and all(type(r) is GlobalTensor for r in results)
    assert x.shape == (4, 6)


def case_autocast(state):
    _, plain, x = setup(state=state)
    weight = torch.randn(6, 6)
    for enabled in (False, True, False):
        with torch.autocast(device_type(), dtype=torch.bfloat16, enabled=enabled):
            expected, actual = plain @ weight, x @ weight
        assert actual.dtype == expected.dtype == (torch.bfloat16 if enabled else torch.float32)
        torch.testing.assert_close(
            actual.full_tensor(), expected, rtol=1.6e-2, atol=1e-2 if enabled else 1e-5
        )


def case_below(state):
    """What reaches the dispatcher itself, as a C++ extension's calls do, raises."""
    _, plain, x = setup(state=state, grad=False)
    with (
        pytest.raises(UnsupportedError, match=r"C\+\+ extension.*full_tensor"),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        torch.add(x, 1)
    same(torch.ops.aten.add.Tensor(x, 1), plain + 1)


def case_inference(state):
    _, plain, x = setup(state=state, grad=False)
    with torch.inference_mode():
        same(x @ torch.eye(6), plain)
        same((x * 2).softmax(0), (plain * 2).softmax(0))


def case_hooks(state):
    _, plain, x = setup(state=state)
    seen = []
    y, z = plain * 2, x * 2
    y.register_hook(lambda g: g * 3)
    z.register_hook(lambda g: (seen.append(tuple(g.shape)), g * 3)[1])
    y.retain_grad()
    z.retain_grad()
    (y * y).sum().backward()
    (z * z).sum().backward()
    assert seen == [(4, 6)]
    same(x.grad, plain.grad)
    same(z.grad, y.grad)


def case_hooks_let_go(state):
    """A tensor that nothing but its own hook refers to is freed, and with it the graph of its step."""
    _, _, x = setup(state=state)
    y = x * 2
    y.register_hook(lambda g: g)
    y.sum().backward()
    seen = weakref.ref(y)
    del y
    gc.collect()
    assert seen() is None


def case_backward_of_many_elements(state):
    _, plain, x = setup(shape=(2, 2), state=state)
    for y in (plain, x):
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            (y.sum(1) * 1).backward()
    plain.sum(1).backward(torch.tensor([1.0, 2.0]))
    x.sum(1).backward(torch.tensor([1.0, 2.0]))
    same(x.grad, plain.grad)
    same(x._grad, plain.grad)


def case_autograd_grad(state):
    mesh, plain, x = setup(state=state)
    weight = torch.randn(6, 6)
    parameter = as_mesh_parameter(distribute_tensor(weight, mesh, [Replicate()]), ("I",))
    weight.requires_grad_()
    expected = torch.autograd.grad((plain @ weight).pow(2).sum(), [plain, weight])
    actual = torch.autograd.grad((x @ parameter).pow(2).sum(), [x, parameter])
    for a, b in zip(actual, expected, strict=True):
        same(a, b)


def case_from_local(state):
    mesh, plain, x = setup(state=state, grad=False)
    again = from_local(x.to_local(), mesh, x.global_layout.states, (4, 6))
    same(again, plain)
    with pytest.raises(UnsupportedError, match="not this rank's part"):
        from_local(torch.zeros(4, 5), mesh, [state], (4, 6))


CASES = {name.removeprefix("case_"): f for name, f in list(globals().items()) if name.startswith("case_")}


def run(rank, world, name, state):
    torch.manual_seed(0)
    CASES[name](state)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("state", ["I", 0, 1])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.host("NumPy reads the host's memory"))
        if name == "numpy"
        else name
        for name in CASES
    ],
)
def test_bypassing_calls_work_or_raise(rank_pool: RankPool, name: str, state):
    assert all(rank_pool.run(WORLD, run, name, state))
