"""Models and layouts that the tests save and load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright_dtensor.api import as_mesh_parameter
from meshwright_dtensor.mesh.layout import stored_placement
from meshwright_dtensor.sharding.boxes import read_region, region_of
from meshwright_dtensor.sharding.intervals import segmented_shard, single_owner_shard

WIDTH, HIDDEN, CLASSES = 16, 36, 9


class Block(nn.Module):
    """Two linear layers, one of two fused parts, a norm with buffers, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.second = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.again = nn.Linear(WIDTH, CLASSES, bias=False)
        self.again.weight = self.head.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.norm(self.first(x))))
        return (self.head(y) + self.again(x)) * self.scale


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def build(layout: str, seed: int = 0) -> nn.Module:
    """The model, its parameters laid out; the values depend on the seed only."""
    torch.manual_seed(seed)
    model: Any = Block()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain":
        return model
    if layout == "fsdp":
        fully_shard(model.second)
        return fully_shard(model)
    if layout == "tp":
        parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
        return model
    if layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallel(model, mesh["tp"])
        return fully_shard(model, mesh=mesh["dp"])
    assert layout == "runs"
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    states = {
        "first.weight": segmented_shard(0, (24, 12), size),
        "first.bias": segmented_shard(0, (24, 12), size),
        "second.weight": 1,
        "head.weight": single_owner_shard(0, CLASSES, size, size - 1),
    }
    new: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in new:
                state = states.get(f"{prefix}.{name}", "I")
                new[id(old)] = mesh_parameter(old.detach(), mesh, state)
            setattr(module, name, new[id(old)])
    return model


def parallel(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    weight = distribute_tensor(model.head.weight.detach(), mesh, [Shard(1)])
    model.head.weight = model.again.weight = nn.Parameter(weight)


def mesh_parameter(full: torch.Tensor, mesh: Any, state: Any) -> Any:
    region = region_of(tuple(full.shape), tuple(mesh.shape), [mesh.get_local_rank(0)], (state,))
    local = read_region(full, region).clone()
    placed = DTensor.from_local(
        local, mesh, [stored_placement(state)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return as_mesh_parameter(placed, (state,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Optimizer steps with artificial gradients, without a forward pass."""
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1) * (step + 1)) + parameter.detach()
        optimizer.step()


def whole(value: Any) -> Any:
    """The global value of a tensor, anything else as it is."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every global value of model and optimizer, by name."""
    values = {name: whole(value) for name, value in model.state_dict(keep_vars=True).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name}/{key}"] = whole(value)
    return values


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names that are not equal bit for bit."""
    same = {
        name
        for name in a.keys() & b.keys()
        if (torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name])
    }
    return sorted((a.keys() | b.keys()) - same)
