"""Loss scaling for fp16 over any mesh: all ranks skip a step, or none does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.devices import default_device
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.mesh.mesh import group_over
from meshwright_dtensor.stages.whole_model import own_tensors, whole_model_among
from meshwright_parallel._torch.core import local_of, unscale_in_place


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for parameters with any placements: the same methods, the same loop.

    A rank has a part of the gradients only, so all ranks of their meshes check together for inf and nan.

    Args:
        device: type of device that the model is on; by default that of the accelerator where there is one, else cpu.
        the others: as for torch.amp.GradScaler.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        here = device or default_device().name
        super().__init__(here, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        with own_tensors(parameters) as mine:
            gradients = [local_of(p.grad) for p in mine if p.grad is not None]
        nonfinite = unscale_in_place(gradients, inv_scale, found_inf)
        for mesh in {p.device_mesh for p in parameters if isinstance(p, DTensor)}:
            names = tuple(mesh.mesh_dim_names or ())
            group = None if mesh.size() == dist.get_world_size() else group_over(mesh, names)
            nbytes = nonfinite.element_size()
            record("all_reduce", "+".join(names), nbytes, "backward", function="GradScaler")
            with waiting():
                dist.all_reduce(nonfinite, op=dist.ReduceOp.MAX, group=group)
        stages = whole_model_among(parameters)
        if stages is not None:
            record("all_reduce", "pp", nonfinite.element_size(), "backward", function="GradScaler")
            with waiting():
                dist.all_reduce(nonfinite, op=dist.ReduceOp.MAX, group=stages.group)
        return {nonfinite.device: nonfinite}
