"""Values that only some stages hold, on every rank of the pipeline axis: one collective, recorded by autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.modes import functorch_active
from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import record
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stages.stage_tensor import StageValue, held, value_of
from meshwright_dtensor.stored.gather import as_global
from meshwright_dtensor.tensor.global_tensor import GlobalTensor

Tensor = torch.Tensor


def exchanged_by_id(values: Iterable[StageValue]) -> dict[int, Tensor]:
    """Id of each value, of at least one -> the value on every rank, as `exchange` gives it (a collective call)."""
    unique = list({id(x): x for x in values}.values())
    return dict(zip(map(id, unique), exchange(unique[0].whole_model, unique), strict=True))


def exchange(model: Any, values: Sequence[StageValue]) -> list[Tensor]:
    """The values on every rank (a collective call): replicated global tensors; their gradients go to the ranks that hold them."""
    refuse_inside(values)
    if functorch_active():
        raise UnsupportedError(
            "a functorch transform (torch.func, vmap) reads a value of one pipeline stage; pass x.full_tensor(), the whole value"
        )
    with held(values):
        wholes = [_whole(value_of(x)) for x in values]
    forms = ((list(x.shape), x.dtype, min(value.holders)) for x, value in zip(wholes, values, strict=True))
    shapes = ", ".join(f"{shape} {dtype} of stage rank {holder}" for shape, dtype, holder in forms)
    model.check_same_call(f"reads values of shapes {shapes}")
    results = _Exchange.apply(model, [min(x.holders) for x in values], [x.here for x in values], *wholes)
    return [distribute(x, model.mesh, ["I"] * model.mesh.ndim) for x in results]


def refuse_inside(values: Iterable[StageValue]) -> None:
    """Raise UnsupportedError if a step runs and this rank does not hold all these values."""
    for x in values:
        if x.whole_model.inside and not x.here:
            raise UnsupportedError(
                f"a value of shape {list(x.shape)} of another pipeline stage is read inside of a step, in a hook for example, "  # type: ignore[attr-defined]
                "where each rank runs its own stages; read it before the step, with .full_tensor()"
            )


def _whole(x: Any) -> Tensor:
    """The whole value as a plain tensor, gathered within the stage; a meta tensor itself."""
    if isinstance(x, DTensor) and not (torch.is_grad_enabled() and x.requires_grad):
        x = as_global(x)
    # another object: a buffer is of a stage again once this is over
    return x.full_tensor() if isinstance(x, (GlobalTensor, DTensor)) else x.view_as(x)


class _Exchange(torch.autograd.Function):
    """Every value from the first of the ranks that hold it. A gradient goes back where this rank holds the value."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, model: Any, sources: list[int], here: list[bool], *wholes: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.model, ctx.here = model, here
        ctx.set_materialize_grads(False)
        return tuple(_shared(model, sources, wholes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.model.gradients_changed()
        return (None, None, None, *(g if here else None for g, here in zip(gradients, ctx.here, strict=True)))


def _shared(model: Any, sources: Sequence[int], wholes: Sequence[Tensor]) -> list[Tensor]:
    sizes = [-(-x.numel() * x.element_size() // 8) * 8 for x in wholes]
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=model.device)
    parts = buffer.split(sizes)
    for part, x, source in zip(parts, wholes, sources, strict=True):
        if source == model.rank:
            # bytes of a conjugated view are those before the conjugation
            flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            part[: flat.numel()] = flat
    kind = "broadcast" if len(set(sources)) == 1 else "all_reduce"
    record(kind, "pp", buffer.numel(), function="values of stages")
    if kind == "broadcast":
        with waiting():
            dist.broadcast(buffer, group=model.group, group_src=sources[0])
    else:
        # every other rank adds zero bits
        with waiting():
            dist.all_reduce(buffer.view(torch.int64), group=model.group)
    return [
        part[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        for part, x in zip(parts, wholes, strict=True)
    ]
