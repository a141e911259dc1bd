"""Expert parallelism by hand: an all-to-all sends each token to the ranks of its experts, another brings the results back.

Rows of the batch are sharded over all ranks. Experts are sharded; gradients of all other parameters are summed in one flat bucket.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers.model import Batch, Experts, Llama, Step, optimizer_of
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd


class ShardedExperts(nn.Module):
    """This rank's experts, and the exchange of tokens."""

    def __init__(self, whole: Experts) -> None:
        super().__init__()
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.count = whole.count
        self.up, self.down = (
            nn.Parameter(p.detach().chunk(self.ranks)[rank].clone()) for p in (whole.up, whole.down)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # one row for each token and slot, in the order of experts, which is that of their ranks
        order = chosen.flatten().argsort(stable=True)
        token = order // chosen.shape[1]
        sent = chosen.flatten().bincount(minlength=self.count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        received = received.view(self.ranks, -1)
        out_sizes, in_sizes = received.sum(1).tolist(), sent.view(self.ranks, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(x[token], out_sizes, in_sizes, dist.group.WORLD)
        # rows come by rank and expert; experts take them together
        parts = rows.split(received.flatten().tolist())
        local = len(self.up)
        results: list[Tensor] = [rows] * len(parts)
        for expert in range(local):
            y = torch.cat(parts[expert::local])
            y = F.linear(F.silu(F.linear(y, self.up[expert])), self.down[expert])
            results[expert::local] = y.split([len(part) for part in parts[expert::local]])
        back = all_to_all_single_autograd(torch.cat(results), in_sizes, out_sizes, dist.group.WORLD)
        return torch.zeros_like(x).index_add(0, token, back * weights.flatten()[order, None])


def setup(model: Llama, batch: Batch) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = {name: rows.chunk(size)[rank] for name, rows in batch.items()}
    for layer in model.layers:
        layer.mlp.experts = ShardedExperts(layer.mlp.experts)
    experts = [p for layer in model.layers for p in layer.mlp.experts.parameters()]
    of_experts = set(experts)
    shared = [p for p in model.parameters() if p not in of_experts]
    optimizer = optimizer_of(model.parameters())
    # gradients are views of one bucket, so that one all-reduce sums them
    bucket = torch.zeros(sum(p.numel() for p in shared))
    for p, part in zip(shared, bucket.split([p.numel() for p in shared]), strict=True):
        p.grad = part.view_as(p)

    def step():
        loss = model(**batch)
        # the mean over ranks: experts have summed theirs in the exchange
        (loss / size).backward()
        dist.all_reduce(bucket)
        optimizer.step()
        bucket.zero_()
        for p in experts:
            p.grad = None
        return loss.detach()

    return step
