"""Small models in which rows of the batch meet, or look as if they did: a product, an operation, a product, a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TIME, WIDTH = 8, 6, 16


class Between(nn.Module):
    """An operation between two products."""

    def __init__(self, operation: Callable[[Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second, self.operation = nn.Linear(WIDTH, WIDTH), nn.Linear(width, WIDTH), operation

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, ..., width]."""
        return self.second(self.operation(self.first(x))).pow(2).mean()


class Recurrent(nn.Module):
    """A recurrent layer between two products."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH, **options)
        self.second = nn.Linear(WIDTH * (1 + self.layer.bidirectional), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, time, width], or [time, rows, width]."""
        return self.second(self.layer(self.first(x))[0]).pow(2).mean()


class Stepped(nn.Module):
    """A recurrent cell in a loop, from zeros."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.second = kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, time, width]."""
        h: Any = torch.zeros(x.shape[0], WIDTH)
        h = (h, torch.zeros_like(h)) if isinstance(self.cell, nn.LSTMCell) else h
        parts = []
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
            parts.append(h[0] if isinstance(h, tuple) else h)
        return self.second(torch.stack(parts, 1)).pow(2).mean()


class Normed(nn.Module):
    """Statistics of the whole batch, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * 16, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 3, 4, 4]."""
        return self.body(x).pow(2).mean()


def by_segment(h: Tensor) -> Tensor:
    """Rows added up in four segments."""
    return torch.zeros(4, WIDTH).index_add(0, torch.arange(h.shape[0]) % 4, h)


def by_column(h: Tensor) -> Tensor:
    """Columns added up."""
    return torch.zeros_like(h).index_add(1, torch.arange(WIDTH) % 4, h)


def masked(h: Tensor) -> Tensor:
    """Where it is large it is cut off."""
    h = h.clone()
    h[h > 0.5] = 0.5
    return h.masked_fill(h < -0.5, 0.0)


def compared(h: Tensor) -> Tensor:
    """Every row with every other, as a contrastive loss does."""
    return (h @ h.t()).softmax(-1) @ h


def routed(h: Tensor) -> Tensor:
    """By an index that depends on the values."""
    out = torch.zeros_like(h)
    first = h.argmax(-1)
    for kind in range(2):
        (rows,) = torch.where(first % 2 == kind)
        out.index_add_(0, rows, h[rows] * (kind + 1))
    return out


ALONE: MappingProxyType[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType(
    {
        "sort features": (lambda: Between(lambda h: h.sort(-1).values), (ROWS, WIDTH)),
        "where": (lambda: Between(lambda h: torch.where(h > 0, h, 0.1 * h)), (ROWS, WIDTH)),
        "masks": (lambda: Between(masked), (ROWS, WIDTH)),
        "flip features": (lambda: Between(lambda h: h.flip(-1)), (ROWS, WIDTH)),
        "fft of features": (
            lambda: Between(lambda h: torch.fft.rfft(h, dim=-1).abs(), WIDTH // 2 + 1),
            (ROWS, WIDTH),
        ),
        "fft of time": (lambda: Between(lambda h: torch.fft.fft(h, dim=1).real), (ROWS, TIME, WIDTH)),
        "index_add of columns": (lambda: Between(by_column), (ROWS, WIDTH)),
        "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, batch_first=True), (ROWS, TIME, WIDTH)),
        "gru": (lambda: Recurrent(nn.GRU, bidirectional=True, batch_first=True), (ROWS, TIME, WIDTH)),
        "rnn": (lambda: Recurrent(nn.RNN, batch_first=True), (ROWS, TIME, WIDTH)),
        "lstm cell": (lambda: Stepped(nn.LSTMCell), (ROWS, TIME, WIDTH)),
        "gru cell": (lambda: Stepped(nn.GRUCell), (ROWS, TIME, WIDTH)),
    }
)
"""Name -> (model, shape of a batch): rows go through alone."""


def shifted(h: Tensor) -> Tensor:
    """Every row is written to where the next one is."""
    made = torch.zeros_like(h)
    made[1:] = h[:-1]
    return made


def first_of(h: Tensor) -> Tensor:
    """Each row depends on another row."""
    made = torch.zeros_like(h)
    made[0] = h[1] * 2
    return made + h


def turned(h: Tensor) -> Tensor:
    """The same where rows are columns, of a square."""
    h = h.transpose(0, 1)
    made = torch.zeros_like(h)
    made[:, 0] = h[:, 1] * 2
    return (made + h).transpose(0, 1)


TOGETHER: MappingProxyType[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = MappingProxyType(
    {
        "sort rows": (lambda: Between(lambda h: h.sort(0).values), (ROWS, WIDTH)),
        "flip rows": (lambda: Between(lambda h: h.flip(0)), (ROWS, WIDTH)),
        "fft of rows": (lambda: Between(lambda h: torch.fft.rfft(h, dim=0).abs()), (ROWS, WIDTH)),
        "index_add of rows": (lambda: Between(by_segment), (ROWS, WIDTH)),
        "masked_select": (
            lambda: Between(lambda h: h * torch.masked_select(h, h > 0).sum()),
            (ROWS, WIDTH),
        ),
        "rows by mask": (lambda: Between(lambda h: h[h[:, 0] > -9.0]), (ROWS, WIDTH)),
        "routed": (lambda: Between(routed), (ROWS, WIDTH)),
        "compared": (lambda: Between(compared), (ROWS, WIDTH)),
        "shifted": (lambda: Between(shifted), (ROWS, WIDTH)),
        "first row": (lambda: Between(first_of), (ROWS, WIDTH)),
        "first row of numbers": (lambda: Between(lambda h: first_of(h[:, 0])[:, None] * h), (ROWS, WIDTH)),
        "first row, turned": (lambda: Between(turned), (WIDTH, WIDTH)),
        "batch norm": (Normed, (ROWS, 3, 4, 4)),
        "lstm, rows in the middle": (lambda: Recurrent(nn.LSTM), (ROWS, TIME, WIDTH)),
        "gru, rows in the middle": (lambda: Recurrent(nn.GRU), (ROWS, TIME, WIDTH)),
        "rnn, sorted after": (
            lambda: nn.Sequential(Between(lambda h: h.flip(0).sort(0).values.cumsum(0))),
            (ROWS, TIME, WIDTH),
        ),
    }
)
"""The same where they meet."""
