"""Data parallelism with Hugging Face's accelerate, which wraps the model in DistributedDataParallel."""

import torch.distributed as dist
from accelerate import Accelerator
from peers.model import Batch, Llama, Step, optimizer_of


def setup(model: Llama, batch: Batch) -> Step:
    accelerator = Accelerator(cpu=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = {name: rows.chunk(size)[rank] for name, rows in batch.items()}
    model, optimizer = accelerator.prepare(model, optimizer_of(model.parameters()))

    def step():
        loss = model(**batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
