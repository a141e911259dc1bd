"""Context parallelism by hand, as Llama 3 was trained: keys and values are gathered, chunks are dealt out in zig-zag.

torch's own context_parallel has no kernel for CPUs. Rank r of n has the chunks r and 2n-1-r of 2n, so that all compute alike.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers.model import Attention, Batch, Llama, Step, loss_of, optimizer_of
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.nn.parallel import DistributedDataParallel


class GatheringAttention(Attention):
    """Queries are this rank's two chunks; keys and values are those of all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = all_gather_single_autograd(torch.stack((k, v)), 3, dist.group.WORLD).chunk(2 * size, 3)
        # the gathered order is 0, 2n-1, 1, 2n-2 ...: even places are the first half
        keys, values = torch.cat((*parts[::2], *parts[1::2][::-1]), 3)
        length = q.shape[2] // 2
        results = []
        for chunk, queries in zip((rank, 2 * size - 1 - rank), q.chunk(2, 2), strict=True):
            end = (chunk + 1) * length
            mask = torch.ones(length, end, dtype=torch.bool).tril(end - length)
            results.append(
                F.scaled_dot_product_attention(queries, keys[:, :, :end], values[:, :, :end], mask)
            )
        return torch.cat(results, 2)


class PartOfTheSequence(Llama):
    """The same model on this rank's chunks."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        cos, sin = self.rotary(zigzag(torch.arange(ids.shape[1] * dist.get_world_size())[None])[0])
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss_of(self.lm_head(self.norm(x)), labels)


def zigzag(rows: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = rows.chunk(2 * size, 1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), 1)


def setup(model: Llama, batch: Batch) -> Step:
    batch = {name: zigzag(rows) for name, rows in batch.items()}
    model.__class__ = PartOfTheSequence
    for layer in model.layers:
        layer.attention.__class__ = GatheringAttention
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model.parameters())

    def step():
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
