"""`mw.distribute_module`: a mesh instead of degrees."""

from __future__ import annotations

import pytest
import torch
from test_planner_models import build, example
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import meshwright as mw
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.parameter import layout_of_dtensor
from meshwright_dtensor.testing.rank_pool import RankPool


def loss_and_gradient(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the gradient of the embedding, whole."""
    loss = model(**example()).loss
    loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    whole = getattr(gradient, "full_tensor", lambda: gradient)()
    return getattr(loss, "full_tensor", lambda: loss)().detach(), whole


def marks(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if name.endswith("mlp.down_proj"):
        assert mesh.mesh_dim_names == ("zero", "tp")
        mw.mark_sharding(module.weight, {"tp": Shard(0)})  # the other dim than the planner takes


def laid_out(rank: int, world_size: int) -> None:
    loss, gradient = loss_and_gradient(build("llama"))
    for names, sizes, fn in ((("dp", "tp"), (2, 2), "AUTO"), (("zero", "tp"), (2, 2), marks)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model = build("llama")
        assert mw.distribute_module(model, mesh, fn, batch=example()) is model
        used = {axis: degree for axis, degree in model.parallel_plan.degrees.items() if degree > 1}
        assert used == dict(zip(names, sizes, strict=True))
        layout = layout_of_dtensor(model.model.layers[0].mlp.down_proj.weight)
        assert layout.states[layout.context.axes.index("tp")] == (0 if fn is marks else 1)
        for value, expected in zip(loss_and_gradient(model), (loss, gradient), strict=True):
            assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()


def makes_dtensors(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))


def refused(rank: int, world_size: int) -> None:
    nameless = init_device_mesh("cpu", (2,))
    with pytest.raises(UsageError, match="has no names for its axes"):
        mw.distribute_module(build("llama"), nameless, batch=example())
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("pd",))
    with pytest.raises(UsageError, match="mesh axis 'pd'"):
        mw.distribute_module(build("llama"), other, batch=example())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(UsageError, match="made a DTensor of"):
        mw.distribute_module(build("llama"), mesh, makes_dtensors, batch=example())
    with pytest.raises(UsageError, match="neither"):
        mw.distribute_module(build("llama"), mesh, "auto", batch=example())


@pytest.mark.slow
def test_it_is_laid_over_the_mesh(rank_pool: RankPool) -> None:
    rank_pool.run(4, laid_out)


@pytest.mark.slow
def test_what_it_refuses(rank_pool: RankPool) -> None:
    rank_pool.run(2, refused)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"zero": 3, "dp": 1}, "zero=3 with dp=1"),
        ({"context_attention": "ring", "cp": 1}, "context_attention='ring' with cp=1"),
        ({"zero": 0, "zero_degree": 2}, "nothing is shared"),
    ],
)
def test_options_that_would_do_nothing(options: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        mw.plan(build("llama"), example(), world_size=2, **options)
