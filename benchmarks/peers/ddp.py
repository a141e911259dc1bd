"""Data parallelism: torch's DistributedDataParallel."""

import torch.distributed as dist
from peers.model import Batch, Llama, Step, optimizer_of
from torch.nn.parallel import DistributedDataParallel


def setup(model: Llama, batch: Batch) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = {name: rows.chunk(size)[rank] for name, rows in batch.items()}
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model.parameters())

    def step():
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
