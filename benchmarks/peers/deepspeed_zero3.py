"""ZeRO-3 with DeepSpeed."""

import deepspeed
import torch.distributed as dist
from peers.model import Batch, Llama, Step, optimizer_of


def setup(model: Llama, batch: Batch) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = {name: rows.chunk(size)[rank] for name, rows in batch.items()}
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": len(batch["ids"]),
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step():
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
