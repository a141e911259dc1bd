"""The ranks of one stage, before a step: one that cannot begin would leave the others waiting in its collectives."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.mesh.mesh import group_over


class Mates:
    """What the ranks of a stage tell each other in one small all-reduce before each step; nothing where there is one.

    Args:
        mesh: of the stage.
        device: where tensors of its collectives live.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.device = device
        self.group: dist.ProcessGroup | None = None
        if mesh is not None and mesh.size() > 1:
            names = mesh.mesh_dim_names
            assert names is not None  # meshes of plans have them
            self.group = group_over(mesh, [name for name, n in zip(names, mesh.shape, strict=True) if n > 1])

    def apart(self, batch: str | None, adds: bool = False) -> str | None:
        """Why this step cannot run in the stage (collective): "" for a failure of another rank, None where it can.

        Args:
            batch: what this rank was given, in words, and does with it; None where it cannot begin.
            adds: whether it has found that the loss adds up, so that backwards run inside of the step.
        """
        if self.group is None:
            return None
        crc = 0 if batch is None else zlib.crc32(batch.encode())
        told = torch.tensor([batch is None, crc, -crc, adds, not adds], dtype=torch.int64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        failed, most, least, some, others = told.tolist()
        if failed:
            return ""
        if most != -least:
            return (
                f"ranks of one stage were given different batches, this one {batch}; give every rank the same"
            )
        if some and others:
            return (
                "ranks of one stage do not agree whether the loss adds up over microbatches, this one found that it "
                f"{'does' if adds else 'does not'}: one of them may have run out of memory where it looked, or computes another "
                "loss; give every rank the same model and memory, or set pipeline.microbatches to 1"
            )
        return None
