"""The gradient norm of one device, and clipping by it, for gradients with any placements.

As in torch, the total is the norm of the norms of the single gradients. The powers of a sharded gradient are summed over
exactly the axes of its shards, so that every element counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.context import follow_call
from meshwright_dtensor.model.stage_info import StageInfo, is_repeated, stage_link
from meshwright_dtensor.stages.whole_model import own_tensors
from meshwright_parallel._torch.core import local_of, scale_in_place

CHUNK = 1024
"""Elements whose norm is computed in the tensor's own precision."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: tensors whose `.grad` counts: DTensors on any meshes and plain tensors, mixed as you like. A plain
            gradient is the whole value. Give the same list on every rank.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm; `math.inf` for the largest magnitude.
        error_if_nonfinite: raise where the norm is nan or infinite.

    Returns:
        The total norm before clipping: a plain 0-dim tensor, the same on every rank.

    Raises RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with own_tensors(given) as mine:
        gradients = [p.grad for p in mine if p.grad is not None]
        total = _total_norm(gradients, [*given, *gradients], norm_type, error_if_nonfinite)
    with torch.no_grad():
        # no branch on the value: it would wait for the device
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        scale_in_place([local_of(gradient) for gradient in gradients], factor)
    return total


@torch.no_grad()
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """The norm of the norms of the global values of `tensors`.

    Arguments, result and errors as in `clip_grad_norm_`; an empty list has norm 0.
    """
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    with own_tensors(given) as mine:
        return _total_norm(mine, given, norm_type, error_if_nonfinite)


@torch.no_grad()
def _total_norm(
    tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """See get_total_norm. `given`: the tensors of all stages, of which `tensors` are those of this rank's."""
    stages = _stages(given)
    p = float(norm_type)
    if math.isnan(p):
        raise UsageError(f"norm_type={norm_type!r} is no norm; use 2.0, math.inf or another number")
    if not tensors and stages is None:
        return torch.tensor(0.0)
    norms = _norms([_without_partial(tensor) for tensor in tensors if not is_repeated(tensor)], p)
    if stages is not None:
        total = _over_stages(norms, stages, p, given[0].device)
    else:
        first = norms[0].device
        total = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), p)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {p} of the gradients is {total.item()}, so they cannot be clipped; "
            "find the operation that produced it, or set error_if_nonfinite=False"
        )
    return total


def _stages(tensors: Iterable[torch.Tensor]) -> StageInfo | None:
    """The pipeline stages of the model of these tensors, None where it has none."""
    meshes = {tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")}
    return next((stages for mesh in meshes if (stages := stage_link(mesh)) is not None), None)


def _over_stages(
    norms: Sequence[torch.Tensor], stages: StageInfo, p: float, device: torch.device
) -> torch.Tensor:
    """The norm of the norms of all stages. A stage without gradients takes part too, on the `device` of the model."""
    dtype = norms[0].dtype if norms else torch.float32
    powers = (
        torch.stack([_power(norm.to(device), p) for norm in norms])
        if norms
        else torch.zeros(0, device=device)
    )
    lowest = p == -math.inf
    if math.isinf(p):
        empty = powers.new_full((1,), math.inf if lowest else 0.0, dtype=torch.float64, device=device)
        value = torch.cat([powers.double().to(device), empty])
        power = value.min() if lowest else value.max()
    else:
        power = powers.double().sum().to(device)
    op = dist.ReduceOp.SUM if not math.isinf(p) else dist.ReduceOp.MIN if lowest else dist.ReduceOp.MAX
    record("all_reduce", "pp", 8, "backward", function="clip_grad_norm_")
    with waiting():
        dist.all_reduce(power, op=op, group=stages.group)
    return _root(power, p).to(dtype)


def _without_partial(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with partial sums reduced: a norm is not linear."""
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _norms(tensors: Sequence[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The p-norm of each tensor, in the tensor's own dtype, on its own device."""
    powers = [_power(local_of(tensor), p) for tensor in tensors]
    meshes: dict[DeviceMesh, list[tuple[int, DTensor]]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            meshes.setdefault(tensor.device_mesh, []).append((index, tensor))
    for mesh, members in meshes.items():
        for axis in range(mesh.ndim):
            sharded = [i for i, tensor in members if tensor.placements[axis].is_shard()]
            if sharded and mesh.size(axis) > 1:
                summed = _reduce(torch.stack([powers[i] for i in sharded]), mesh, axis, p)
                for index, power in zip(sharded, summed.unbind(), strict=True):
                    powers[index] = power
    return [_root(power, p).to(tensor.dtype) for power, tensor in zip(powers, tensors, strict=True)]


def _power(local: torch.Tensor, p: float) -> torch.Tensor:
    """The p-th power of one shard's norm, or its extreme, in double precision.

    Norms of pieces are summed in double precision: on a CPU torch adds one element after the other, and its norm of 20M
    float32 elements is off by 1e-3.
    """
    # an empty shard
    if local.numel() == 0:
        return torch.full((), math.inf if p == -math.inf else 0.0, dtype=torch.float64, device=local.device)
    dtype = torch.float32 if local.dtype in (torch.float16, torch.bfloat16) else local.dtype
    flat = local.reshape(-1)
    split = flat.numel() - flat.numel() % CHUNK
    norms = [
        torch.linalg.vector_norm(piece, p, dim=-1, dtype=dtype).double()
        for piece in (flat[:split].view(-1, CHUNK), flat[split:].view(1, -1))
        if piece.numel()
    ]
    norm = torch.cat(norms)
    if math.isinf(p):
        return norm.max() if p > 0 else norm.min()
    # p = 0 counts elements
    return (norm if p == 0 else norm**p).sum()


def _reduce(values: torch.Tensor, mesh: DeviceMesh, axis: int, p: float) -> torch.Tensor:
    """Sum of powers, or the extreme for an infinite p, over one mesh axis; one collective."""
    group = mesh.get_group(axis)
    name = (mesh.mesh_dim_names or ())[axis] if mesh.mesh_dim_names else str(axis)
    infinite = math.isinf(p)
    # the maximum of nan and a number depends on the backend, so nan is sent as a flag
    if infinite:
        sign = 1.0 if p > 0 else -1.0
        flags = values.isnan().to(values.dtype)
        values = torch.cat([sign * values.nan_to_num(nan=0.0, posinf=math.inf), flags])
    follow_call(mesh, "clip_grad_norm_")
    record("all_reduce", name, values.numel() * values.element_size(), "backward", function="clip_grad_norm_")
    with waiting():
        dist.all_reduce(values, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    if not infinite:
        return values
    extreme, is_nan = values.chunk(2)
    return torch.where(is_nan > 0, math.nan, sign * extreme)


def _root(power: torch.Tensor, p: float) -> torch.Tensor:
    return power if math.isinf(p) or p == 0 else power ** (1.0 / p)
