"""Pipeline parallelism: stages cut by hand, torch.distributed.pipelining runs 1F1B over 8 microbatches."""

import torch
import torch.distributed as dist
from peers.model import Batch, Llama, Step, loss_of, optimizer_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Stage(nn.Module):
    """A part of the layers; the first one embeds, the last one has the head."""

    def __init__(self, model: Llama, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.layers) // stages
        self.layers = model.layers[stage * each : (stage + 1) * each]
        self.embed = model.embed if stage == 0 else nn.Identity()
        last = stage == stages - 1
        self.norm, self.lm_head = (model.norm, model.lm_head) if last else (nn.Identity(), nn.Identity())
        self.rotary = model.rotary

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary(torch.arange(x.shape[1]))
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def setup(model: Llama, batch: Batch) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = Stage(model, rank, size)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_of)
    optimizer = optimizer_of(module.parameters())

    def step():
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["ids"])
        elif rank < size - 1:
            schedule.step()
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step
