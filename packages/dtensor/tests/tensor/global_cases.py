"""Calls that a model may make on a tensor: name -> (function, shapes of its inputs, whether gradients are compared)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.testing.on_device import seeded

A = ((4, 6, 8),)
B = ((4, 6, 8), (4, 6, 8))
ODD = ((5, 7, 9),)
W = torch.randn(8, 8, generator=seeded(7))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(2).sum(-1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.unsqueeze(-1) * 2 * x


def in_place(x):
    x = x * 1
    x += 1
    x.mul_(2)
    x[:, 0] = 3.0
    return x


def in_place_other(x, y):
    x = x * 1
    x.add_(y)
    return x


def in_place_slices(x):
    x = x * 1
    x[:, 2:4] = x[:, 0:2] * 2
    x[1] = 0
    return x


def mixed(x):
    y = x.exp()
    return (y.sum() + y[0].sum() * 2) + (x @ torch.ones(8, 3)).sum()


def attention(x, y):
    return F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None], is_causal=True)


def branches(x):
    return (x * len(x)) if (x.abs().sum() > 0) else x


def heads(x):
    q = x.view(4, 6, 2, 4).transpose(1, 2)
    return (q @ q.transpose(-1, -2)).softmax(-1).matmul(q).transpose(1, 2).reshape(4, 6, -1)


CASES = {
    "split": (lambda x: x.split(4, -1), A, True),
    "chunk": (lambda x: x.chunk(2, 0), A, True),
    "unbind": (lambda x: x.unbind(1), A, True),
    "slice": (lambda x: x[:, 1:4], A, True),
    "slice_last": (lambda x: x[..., -1:, :] * 2, A, True),
    "select_newaxis": (lambda x: x[:, None, 2], A, True),
    "softmax": (lambda x: x.softmax(-1), A, True),
    "log_softmax": (lambda x: F.log_softmax(x, 1), A, True),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), A, True),
    "group_norm": (lambda x: F.group_norm(x, 3), A, True),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), A, True),
    "mean_var": (lambda x: (x - x.mean(1, keepdim=True)) / x.var(-1, keepdim=True), A, True),
    "mean_odd": (lambda x: x.mean(0) * x.mean(), ODD, True),
    "max": (lambda x: x.max(), A, True),
    "max_dim": (lambda x: x.max(-1), A, True),
    "amax": (lambda x: x.amax(1), A, True),
    "argmax": (lambda x: x.argmax(-1), A, False),
    "cumsum": (lambda x: x.cumsum(1), A, True),
    "cumsum_negative": (lambda x: x.cumsum(-1), A, True),
    "matmul": (lambda x, y: x @ y.transpose(1, 2), B, True),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), B, True),
    "bmm": (torch.bmm, ((4, 6, 8), (4, 8, 6)), True),
    "arithmetic": (lambda x, y: x * y + y - 2 * x / 3, B, True),
    "broadcast": (lambda x, y: x * y, ((4, 6, 8), (6, 1)), True),
    "cat": (lambda x, y: torch.cat([x, y], 1), B, True),
    "cat_empty": (lambda x: torch.cat([torch.tensor([]), x], 1), A, True),
    "stack": (lambda x, y: torch.stack([x, y]), B, True),
    "flatten": (lambda x: x.flatten(0, 1), A, True),
    "reshape": (lambda x: x.reshape(4, -1), A, True),
    "view_merge": (lambda x: x.view(-1, 8) * 1.5, A, True),
    "unflatten": (lambda x: x.unflatten(-1, (2, 4)), A, True),
    "heads": (heads, A, True),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous(), A, True),
    "T": (lambda x: x[0].T, A, True),
    "expand": (lambda x: x[:, :1].expand(-1, 5, -1) * 2, A, True),
    "repeat": (lambda x: x.repeat(1, 2, 1), A, True),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=1), A, True),
    "roll": (lambda x: x.roll(1, 1), A, True),
    "flip": (lambda x: x.flip(0), A, True),
    "pad": (lambda x: F.pad(x, (1, 2)), A, True),
    "sort": (lambda x: x.sort(-1)[0], A, True),
    "topk": (lambda x: x.topk(2, -1)[0], A, True),
    "where": (lambda x: torch.where(x > 0, x, 0.0), A, True),
    "tril": (lambda x: x.tril(), A, True),
    "index": (lambda x: x[torch.tensor([0, 2])], A, True),
    "index_inner": (lambda x: x[:, torch.tensor([5, 1, 1])], A, True),
    "index_select": (lambda x: x.index_select(2, torch.tensor([7, 0, 0])), A, True),
    "gather": (lambda x: x.gather(1, torch.zeros(4, 2, 8, dtype=torch.long)), A, True),
    "take_along": (lambda x: x.take_along_dim(torch.ones(4, 1, 8, dtype=torch.long), 1), A, True),
    "mask": (lambda x: x[torch.arange(4) > 1], A, True),
    "masked_fill": (lambda x: x.masked_fill(torch.arange(8) > 3, -1.0), A, True),
    "norm": (lambda x: x.norm(), A, True),
    "logsumexp": (lambda x: x.logsumexp(-1), A, True),
    "conv1d": (lambda x: F.conv1d(x, torch.ones(3, 6, 3)), A, True),
    "sdpa": (attention, B, True),
    "iterate": (lambda x: sum(r * (i + 1) for i, r in enumerate(x)), A, True),
    "branch_on_value": (branches, A, True),
    "in_place": (in_place, A, True),
    "in_place_other": (in_place_other, B, True),
    "in_place_slices": (in_place_slices, A, True),
    "masked_fill_": (lambda x: (x * 1).masked_fill_(torch.arange(8) > 3, 0.0), A, True),
    "scalar_mix": (lambda x, y: x * (y.sum() + 50) / (y.mean() + 2), B, True),
    "item": (lambda x: x * x.detach().sum().item(), A, True),
    "two_uses": (mixed, A, True),
    "function": (Square.apply, A, True),
    "checkpoint": (
        lambda x: checkpoint(lambda z: F.silu(z @ W).softmax(-1) * z, x, use_reentrant=False), A, True),
    "checkpoint_reentrant": (
        lambda x: checkpoint(lambda z: F.silu(z @ W).softmax(-1) * z, x, use_reentrant=True), A, True),
    "out": (lambda x: torch.add(x, 1, out=torch.empty(4, 6, 8)), A, False),
    "square": (lambda x: (x * x).sum(1) + torch.bmm(x, x.transpose(1, 2)).sum(1), ((4, 8, 8),), True),
    "keywords": (lambda x: F.linear(weight=W, bias=W[1], input=x) + F.layer_norm(input=x, normalized_shape=(8,)), A, True),
    "numel": (lambda x: x * x.numel() / x.size(1), A, True),
    "new_zeros": (lambda x: torch.cat([x.new_zeros(4, 1, 8), x], 1), A, True),
    "zeros_like": (lambda x: x + torch.zeros_like(x) + torch.ones_like(x), A, True),
    "to_double": (lambda x: x.to(torch.float64).sum(1), A, True),
    "type_as": (lambda x: (x > 0).type_as(x) * x, A, True),
    "clamp": (lambda x: x.clamp(min=-0.5, max=0.5), A, True),
    "one_hot": (lambda x: F.one_hot(x.argmax(-1), 8).float() * x, A, True),
    "linear": (lambda x: F.linear(x, W, W[0]), A, True),
    "embedding": (lambda x: F.embedding((x > 0).long(), W), A, False),
    "cross_entropy": (lambda x: F.cross_entropy(x.view(-1, 8), (torch.arange(24) * 5) % 8), A, True),
    "mse": (lambda x, y: F.mse_loss(x, y), B, True),
    "nll": (lambda x: F.nll_loss(x[0].log_softmax(-1), torch.arange(6) % 8), A, True),
    "dropout_off": (lambda x: F.dropout(x, 0.5, training=False), A, True),
    "odd": (lambda x: F.gelu(x).sum(-1) * 2, ODD, True),
    "odd_matmul": (lambda x, y: x @ y, ((5, 7, 9), (9, 3)), True),
    "odd_view": (lambda x: x.reshape(35, 9).softmax(-1), ODD, True),
}  # fmt: skip
