"""Operations of a model, as torch counts them in a real run and as the planner says that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner import profile_model
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.flops import backward_flops, by_name, forward_flops
from meshwright_planner.trace.recorder.record import record

BOOK = RuleBook.first_party()


def counted(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """What torch counts of the forward and of the backward pass; attention by its products, since kernels are not counted."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(*batch.args, **batch.kwargs).sum()
        forward = counter.get_total_flops()
        out.backward()
    return forward, counter.get_total_flops() - forward


def planned(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """What the planner says of both, with what the model's own checkpoints run again."""
    tape = record(model, batch, BOOK.composites)
    forward = [forward_flops(node, tape.values, by_name(BOOK.composites)) for node in tape.nodes]
    nodes = zip(tape.nodes, tape.flows, forward, strict=True)
    back = sum(backward_flops(node, tape.values, flows, f) for node, flows, f in nodes)
    return sum(forward), back + sum(again * f for again, f in zip(tape.again, forward, strict=True))


def profiled(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """What the table of a profile says of both."""
    total = profile_model(model, (*batch.args,)).total
    return total.forward_flops, total.backward_flops + total.again_flops


def kept(model: nn.Module, batch: Batch) -> int:
    """Bytes of the distinct storages that autograd keeps in a real run, parameters and buffers aside."""
    lasting = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held: list[torch.Tensor] = []  # an address must not be used again

    def pack(t: torch.Tensor) -> torch.Tensor:
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*batch.args, **batch.kwargs)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert out.requires_grad
    return sum(size for address, size in sizes.items() if address not in lasting)


class Residual(nn.Module):
    """A block of attention over 32 channels; its last product keeps nothing, so that torch stops before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """So many blocks between two layers, run as `run` says: (blocks, x) -> x."""

    def __init__(self, run: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor], blocks: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.run(self.blocks, self.first(x))).square().mean()


def through(blocks: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """One block after the other."""
    for block in blocks:
        x = block(x)
    return x
