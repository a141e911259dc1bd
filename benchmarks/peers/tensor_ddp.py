"""Tensor times data parallelism: parallelize_module in pairs of ranks, and DistributedDataParallel over the pairs.

DDP takes no DTensors: torch's own transform shows it their local parts.
"""

import torch.distributed as dist
from peers.model import Batch, Llama, Step, optimizer_of
from peers.tensor import shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel


def setup(model: Llama, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    batch = {name: rows.chunk(size)[rank] for name, rows in batch.items()}
    shard(model, mesh["tp"])
    _pre_dp_module_transform(model)
    model = DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)
    optimizer = optimizer_of(model.parameters())

    def step():
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().detach()

    return step
