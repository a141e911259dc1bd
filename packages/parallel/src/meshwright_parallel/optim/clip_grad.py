"""The gradient norm of one device, and clipping by it, for gradients that lie anywhere.

Like torch, the total is the norm of the norms of the single gradients. A gradient that is sharded on some mesh axes
adds up its shards' powers over exactly those axes, so that every element is counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.stage_info import StageInfo, is_repeated, stage_link
from meshwright_parallel._torch.core import local_of, scale_in_place

CHUNK = 1024
"""Elements of which the norm is taken in the tensor's own precision."""


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does.

    Args:
        parameters: tensors whose `.grad` counts: DTensors on any meshes and plain tensors, mixed as you like. A plain
            gradient is the whole value. Give the same list on every rank.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm; `math.inf` for the largest magnitude.
        error_if_nonfinite: raise where the norm is nan or infinite.

    Returns:
        The total norm before clipping: a plain 0-dim tensor, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in given if p.grad is not None]
    total = _total_norm(gradients, _division([*given, *gradients]), norm_type, error_if_nonfinite)
    with torch.no_grad():
        factor = torch.clamp(
            max_norm / (total + 1e-6), max=1.0
        )  # never a branch: that would wait for the device
        scale_in_place([local_of(gradient) for gradient in gradients], factor)
    return total


@torch.no_grad()
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """The norm of the norms of `tensors`, each counted as the one global value that it is.

    Arguments, result and errors as in `clip_grad_norm_`; an empty list has norm 0.
    """
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return _total_norm(given, _division(given), norm_type, error_if_nonfinite)


@torch.no_grad()
def _total_norm(
    given: Sequence[torch.Tensor], division: StageInfo | None, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """See get_total_norm; `division`: other ranks hold other tensors, and all take part."""
    p = float(norm_type)
    if math.isnan(p):
        raise UsageError(f"norm_type={norm_type!r} is no norm; use 2.0, math.inf or another number")
    if not given and division is None:
        return torch.tensor(0.0)
    own = [tensor for tensor in given if not is_repeated(tensor)]
    norms = _norms([_without_partial(tensor) for tensor in own], p)
    if division is not None:
        total = _over_stages(norms, division, p)
    else:
        first = norms[0].device
        total = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), p)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {p} of the gradients is {total.item()}, so they cannot be clipped; "
            "find the step that produced it, or set error_if_nonfinite=False"
        )
    return total


def _division(tensors: Iterable[torch.Tensor]) -> StageInfo | None:
    """How the model of these tensors is divided by modules, None where it is not."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return next((found for mesh in meshes if (found := stage_link(mesh)) is not None), None)


def _over_stages(norms: Sequence[torch.Tensor], division: StageInfo, p: float) -> torch.Tensor:
    """The norm of the norms of all ranks that hold other parts of the model."""
    dtype = norms[0].dtype if norms else torch.float32
    device = norms[0].device if norms else torch.device("cpu")
    own = torch.stack([_part(norm.to(device), p) for norm in norms]) if norms else torch.zeros(0)
    lowest = p == -math.inf
    if math.isinf(p):
        empty = own.new_full((1,), math.inf if lowest else 0.0, dtype=torch.float64, device=device)
        value = torch.cat([own.double().to(device), empty])
        power = value.min() if lowest else value.max()
    else:
        power = own.double().sum().to(device)
    op = dist.ReduceOp.SUM if not math.isinf(p) else dist.ReduceOp.MIN if lowest else dist.ReduceOp.MAX
    record("all_reduce", "pp", 8, "backward", function="clip_grad_norm_")
    dist.all_reduce(power, op=op, group=division.group)
    return _root(power, p).to(dtype)


def _without_partial(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with partial sums completed: a norm is not linear."""
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _norms(tensors: Sequence[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The p-norm of each tensor, in the tensor's own dtype, on its own device."""
    wide = [_part(local_of(tensor), p) for tensor in tensors]
    meshes: dict[DeviceMesh, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            meshes.setdefault(tensor.device_mesh, []).append(index)
    for mesh, members in meshes.items():
        for axis in range(mesh.ndim):
            sharded = [i for i in members if _shards(tensors[i], axis)]
            if sharded and mesh.size(axis) > 1:
                summed = _reduce(torch.stack([wide[i] for i in sharded]), mesh, axis, p)
                for index, value in zip(sharded, summed.unbind(), strict=True):
                    wide[index] = value
    return [_root(value, p).to(tensor.dtype) for value, tensor in zip(wide, tensors, strict=True)]


def _part(local: torch.Tensor, p: float) -> torch.Tensor:
    """What one shard adds to the norm: the p-th power of its own norm, or its extreme; in double precision.

    Norms of pieces add up in double precision: torch's own of a whole float32 tensor is off by 1e-3 at 20M elements on
    CPU, since it adds one element after the other.
    """
    if local.numel() == 0:  # a rank that stock DTensor left empty
        return torch.full((), math.inf if p == -math.inf else 0.0, dtype=torch.float64, device=local.device)
    flat = local.reshape(-1)
    cut = flat.numel() - flat.numel() % CHUNK
    norms = [
        torch.linalg.vector_norm(piece, p, dim=-1, dtype=_accurate(local.dtype)).double()
        for piece in (flat[:cut].view(-1, CHUNK), flat[cut:].view(1, -1))
        if piece.numel()
    ]
    norm = torch.cat(norms)
    if math.isinf(p):
        return norm.max() if p > 0 else norm.min()
    return (norm if p == 0 else norm**p).sum()  # p = 0 counts, and counts add up as they are


def _shards(tensor: torch.Tensor, axis: int) -> bool:
    return isinstance(tensor, DTensor) and tensor.placements[axis].is_shard()


def _reduce(values: torch.Tensor, mesh: DeviceMesh, axis: int, p: float) -> torch.Tensor:
    """Sum of powers, or the extreme for an infinite p, over one mesh axis; one collective."""
    group = mesh.get_group(axis)
    name = (mesh.mesh_dim_names or ())[axis] if mesh.mesh_dim_names else str(axis)
    infinite = math.isinf(p)
    if infinite:  # the maximum of nan and a number is either, depending on the backend: nan travels as a flag
        sign = 1.0 if p > 0 else -1.0
        values = torch.cat(
            [sign * values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().to(values.dtype)]
        )
    record("all_reduce", name, values.numel() * values.element_size(), "backward", function="clip_grad_norm_")
    dist.all_reduce(values, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    if not infinite:
        return values
    extreme, is_nan = values.chunk(2)
    return torch.where(is_nan > 0, math.nan, sign * extreme)


def _root(power: torch.Tensor, p: float) -> torch.Tensor:
    return power if math.isinf(p) or p == 0 else power ** (1.0 / p)


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
