"""Writes to parameters, gradients and optimizer states: (name, function), each run on one device and on many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor
Write = Callable[[Any], Any]


def _numbers(*shape: int) -> Tensor:
    """Distinct values, the same on every rank and on one device."""
    count = torch.Size(shape).numel()
    return torch.linspace(-1.0, 2.0, count).reshape(shape)


def _assign(p: Any, index: Any, value: Any) -> None:
    p[index] = value


def _each_row(p: Any) -> None:
    for number, row in enumerate(p):
        row.fill_(number)


def _twice_written(p: Any) -> None:
    row = p[0]
    row.zero_()
    p[1].fill_(3)
    row.add_(p[1])


def _read_after_write(p: Any) -> Any:
    """The values of a view after its base was written to."""
    row = p[1]
    p.mul_(2)
    p[1, 0] = 7.0
    return row.clone()


def _read_between(p: Any) -> Any:
    flat = p.view(-1)
    before = flat[3].clone()
    p[0].zero_()
    return torch.stack([before.reshape(()), flat[0].reshape(())])


def _imul_row(p: Any) -> None:
    p[0] *= 0


def _iadd_plain(p: Any) -> None:
    p += _numbers(*p.shape)


def _mul_mask(p: Any) -> None:
    p.mul_((_numbers(*p.shape) > 0).float())


def _parts(p: Any) -> None:
    for number, part in enumerate(p.chunk(3)):
        part.mul_(number)
    for number, part in enumerate(p.split(2, dim=1)):
        part.add_(number)
    p.unbind(1)[2].fill_(0.5)
    torch.tensor_split(p, 2)[1].sub_(1)


def _add_recorded(p: Any) -> None:
    p.data += p * 2


def _copied_within(p: Any) -> None:
    p[:2].copy_(p[3:5])


def _out(p: Any) -> None:
    torch.mul(_numbers(*p.shape), 2, out=p)


def _out_view(p: Any) -> None:
    torch.add(_numbers(p.shape[1]), 1, out=p[2])


def _scattered(p: Any) -> None:
    p.index_fill_(0, torch.tensor([0, 4]), 3)
    p.index_copy_(1, torch.tensor([2]), _numbers(p.shape[0], 1))
    p.scatter_(0, torch.zeros(1, p.shape[1], dtype=torch.long), -1.0)
    p.index_add_(0, torch.tensor([1, 1]), _numbers(2, p.shape[1]))
    p.masked_fill_(_numbers(*p.shape) > 1.5, 9)
    p.masked_scatter_(_numbers(*p.shape) < -0.5, _numbers(*p.shape))
    p.fill_diagonal_(4)
    p.tril_()


WRITES: dict[str, Write] = {
    "p[0].zero_()": lambda p: p[0].zero_(),
    "p[-1].fill_()": lambda p: p[-1].fill_(2),
    "p[:, 1:3].mul_(2)": lambda p: p[:, 1:3].mul_(2),
    "p[1:3].add_(1)": lambda p: p[1:3].add_(1),
    "p[::2].neg_()": lambda p: p[::2].neg_(),
    "p[1:, ::2][1].zero_()": lambda p: p[1:, ::2][1].zero_(),
    "p[..., None][2].zero_()": lambda p: p[..., None][2].zero_(),
    "p[3] = 1": lambda p: _assign(p, 3, 1.0),
    "p[1, 2] = 5": lambda p: _assign(p, (1, 2), 5.0),
    "p[:, 2] = column": lambda p: _assign(p, (slice(None), 2), _numbers(p.shape[0])),
    "p[:2] = p[3:5]": lambda p: _assign(p, slice(0, 2), p[3:5]),
    "p[:] = whole": lambda p: _assign(p, slice(None), _numbers(*p.shape)),
    "p[mask] = 0": lambda p: _assign(p, p > 0, 0.0),
    "p[plain mask] = 0": lambda p: _assign(p, _numbers(*p.shape) > 0, 0.0),
    "p[row mask] = 0": lambda p: _assign(p, _numbers(p.shape[0]) > 0, 0.0),
    "p[mask] = p[mask] * 2": lambda p: _assign(p, p > 0, p[p > 0] * 2),
    "p[list] = value": lambda p: _assign(p, [0, 3], _numbers(2, p.shape[1])),
    "p[rows, columns] = values": lambda p: _assign(
        p, (torch.tensor([0, 3]), torch.tensor([1, 2])), _numbers(2)
    ),
    "p[tensor(3)].zero_()": lambda p: p[torch.tensor(3)].zero_(),
    "p[tensor([3])].zero_()": lambda p: p[torch.tensor([3])].zero_(),
    "p[mask].zero_()": lambda p: p[_numbers(*p.shape) > 0].zero_(),
    "p[0] *= 0": _imul_row,
    "p += plain": _iadd_plain,
    "p.add_(plain)": lambda p: p.add_(_numbers(*p.shape), alpha=2),
    "p.add_(row)": lambda p: p.add_(_numbers(p.shape[1])),
    "p.mul_(mask)": _mul_mask,
    "p.copy_(plain)": lambda p: p.copy_(_numbers(*p.shape)),
    "p.copy_(row)": lambda p: p.copy_(_numbers(p.shape[1])),
    "p.lerp_(plain)": lambda p: p.lerp_(_numbers(*p.shape), 0.25),
    "p.addmm_()": lambda p: p.addmm_(_numbers(p.shape[0], 3), _numbers(3, p.shape[1])),
    "p.clamp_().abs_()": lambda p: p.clamp_(-0.1, 0.2).abs_(),
    "p.view(-1)[5] = 0": lambda p: _assign(p.view(-1), 5, 0.0),
    "p.view(-1)[2:9].zero_()": lambda p: p.view(-1)[2:9].zero_(),
    "p.flatten().mul_(2)": lambda p: p.flatten().mul_(2),
    "p.reshape(-1)[1:].copy_()": lambda p: p.reshape(-1)[1:].copy_(_numbers(p.numel() - 1)),
    "p.T.add_(1)": lambda p: p.T.add_(1),
    "p.T[0].zero_()": lambda p: p.T[0].zero_(),
    "p.t()[1:3] = 2": lambda p: _assign(p.t(), slice(1, 3), 2.0),
    "p.mT.copy_()": lambda p: p.mT.copy_(_numbers(p.shape[1], p.shape[0])),
    "p.T.reshape(-1).zero_()": lambda p: p.T.reshape(-1).zero_(),
    "p.T[1] += 1": lambda p: p.T[1].__iadd__(1),
    "p.transpose(0, 1)[0] = 1": lambda p: _assign(p.transpose(0, 1), 0, 1.0),
    "p.permute(1, 0).mul_(3)": lambda p: p.permute(1, 0).mul_(3),
    "p.diagonal().fill_(1)": lambda p: p.diagonal().fill_(1),
    "p.diagonal().copy_()": lambda p: p.diagonal().copy_(_numbers(min(p.shape))),
    "p.narrow(0, 1, 3).zero_()": lambda p: p.narrow(0, 1, 3).zero_(),
    "torch.narrow(p, 1, 1, 2).zero_()": lambda p: torch.narrow(p, 1, 1, 2).zero_(),
    "p.select(0, 2).zero_()": lambda p: p.select(0, 2).zero_(),
    "p.select(1, 2).zero_()": lambda p: p.select(1, 2).zero_(),
    "p.unsqueeze(0)[0, 1].zero_()": lambda p: p.unsqueeze(0)[0, 1].zero_(),
    "p.as_strided().zero_()": lambda p: p.as_strided((2, 2), (p.shape[1], 1)).zero_(),
    "p.unfold().zero_()": lambda p: p.unfold(0, 2, 3)[1].zero_(),
    "p.detach()[0].zero_()": lambda p: p.detach()[0].zero_(),
    "p[0].detach().zero_()": lambda p: p[0].detach().zero_(),
    "p[0].data.zero_()": lambda p: p[0].data.zero_(),
    "p.data[3] = 1": lambda p: _assign(p.data, 3, 1.0),
    "p.data[:, 1].add_(1)": lambda p: p.data[:, 1].add_(1),
    "p.data.view(-1)[4] = 1": lambda p: _assign(p.data.view(-1), 4, 1.0),
    "p.data.add_(plain)": lambda p: p.data.add_(_numbers(*p.shape)),
    "p.data.add_(recorded)": lambda p: p.data.add_(p * 2),
    "p.data += recorded": _add_recorded,
    "p.data = whole": lambda p: setattr(p, "data", _numbers(*p.shape)),
    "relu(p[0], inplace=True)": lambda p: F.relu(p[0], inplace=True),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "foreach of views": lambda p: torch._foreach_add_([p[0], p[:, 1]], [p[2], _numbers(p.shape[0])], alpha=2),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(_numbers(p.numel()), [p]),
    "rows": _each_row,
    "chunk, split, unbind, tensor_split": _parts,
    "two views": _twice_written,
    "read after write": _read_after_write,
    "read between writes": _read_between,
    "copied within": _copied_within,
    "out=p": _out,
    "out=p[2]": _out_view,
    "scattered": _scattered,
    "p[0].normal_()": lambda p: p[0].normal_(),
    "p[:, 1:3].uniform_()": lambda p: p[:, 1:3].uniform_(),
    "p.T.normal_()": lambda p: p.T.normal_(),
    "p.normal_()": lambda p: p.normal_(),
    "p.data.normal_()": lambda p: p.data.normal_(std=0.1),
    "p.data.bernoulli_()": lambda p: p.data.bernoulli_(0.3),
    "p.add_(randn_like)": lambda p: p.add_(torch.randn_like(p), alpha=0.1),
    "p.data.add_(randn_like)": lambda p: p.data.add_(torch.randn_like(p.data)),
    "p[1].add_(rand_like)": lambda p: p[1].add_(torch.rand_like(p[1])),
    "p.sub_(rand_like.T)": lambda p: p.T.sub_(torch.rand_like(p.T)),
    "nn.init.normal_(p[0])": lambda p: nn.init.normal_(p[0]),
    "nn.init.zeros_(p.data[1])": lambda p: nn.init.zeros_(p.data[1]),
    "nn.init.xavier_uniform_(p.data)": lambda p: nn.init.xavier_uniform_(p.data),
    "nn.init.orthogonal_(p[:3])": lambda p: nn.init.orthogonal_(p[:3]),
    "nn.init.dirac_(view)": lambda p: nn.init.dirac_(p.unsqueeze(-1)),
}
"""Functions of a matrix of at least 5 x 4 elements."""

READS: dict[str, Write] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda p: torch.randint_like(p, 7),
    "bernoulli": lambda p: torch.bernoulli(p.abs().clamp(max=1)),
    "dropout": lambda p: F.dropout(p, 0.5),
    "torch.normal": lambda p: torch.normal(p, 1.0),
    "randn_like of a view": lambda p: torch.randn_like(p[1:3]),
    "p + plain": lambda p: p + _numbers(*p.shape),
    "p[0] * plain": lambda p: p[0] * _numbers(p.shape[1]),
    "plain * p.T": lambda p: _numbers(p.shape[1], p.shape[0]) * p.T,
    "p.T.clone()": lambda p: p.T.clone(),
    "p.view(-1)[1::3]": lambda p: p.view(-1)[1::3],
    "p.flip(0)": lambda p: p.flip(0),
}
"""Functions that return a value: random numbers, and views that are read."""

INITS: dict[str, Write] = {
    "orthogonal_": lambda p: nn.init.orthogonal_(p, 1.5),
    "eye_": nn.init.eye_,
    "sparse_": lambda p: nn.init.sparse_(p, 0.3),
    "trunc_normal_": nn.init.trunc_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "constant_": lambda p: nn.init.constant_(p, 0.5),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
}
"""Initialisers, called with gradients on, as users call them."""
