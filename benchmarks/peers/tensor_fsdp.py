"""Tensor parallelism times ZeRO-3: parallelize_module in pairs of ranks, and fully_shard over the pairs."""

import torch.distributed as dist
from peers.model import Batch, Llama, Step, optimizer_of
from peers.tensor import shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel


def setup(model: Llama, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    batch = {name: rows.chunk(size)[rank] for name, rows in batch.items()}
    shard(model, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = optimizer_of(model.parameters())

    def step():
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().detach()

    return step
