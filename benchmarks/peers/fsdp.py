"""ZeRO-3: torch's fully_shard (FSDP2), block by block."""

import torch.distributed as dist
from peers.model import Batch, Llama, Step, optimizer_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def setup(model: Llama, batch: Batch) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = {name: rows.chunk(size)[rank] for name, rows in batch.items()}
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model.parameters())

    def step():
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
