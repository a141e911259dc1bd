"""Short forms for catalogues of models: objects named by module and class, and batches of random values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]
"""A model and its batch: a dict of keywords or a tuple of arguments. The first dim of tensors is that of rows."""
Catalogue = Mapping[str, Mapping[str, Callable[[], Made]]]
"""Package on PyPI -> name of a model -> function that makes it."""

ROWS = 4


def get(path: str) -> Any:
    """The object "module:name"; modules of third parties are imported only when used."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def new(path: str, *arguments: Any, **options: Any) -> Any:
    """An instance of the class, or the result of the function, "module:name"."""
    return get(path)(*arguments, **options)


def floats(*shape: int) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape)


def images(size: int = 32, channels: int = 3, rows: int = ROWS) -> tuple[Tensor]:
    """The batch of a model of images: [rows, channels, size, size]."""
    return (floats(rows, channels, size, size),)


def tokens(length: int = 16, vocabulary: int = 64, rows: int = ROWS) -> Tensor:
    """Token numbers: [rows, length]."""
    return torch.randint(vocabulary, (rows, length))


class Called(nn.Module):
    """A model used by another method than its forward, as its users do."""

    def __init__(self, model: Any, method: str, **options: Any) -> None:
        super().__init__()
        self.model, self.method, self.options = model, method, options

    def forward(self, *arguments: Any) -> Any:
        return getattr(self.model, self.method)(*arguments, **self.options)


class Inside(nn.Module):
    """A layer between two projections, as it would be in a model: [rows, length, width] -> the same shape."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(width, width), layer, nn.Linear(width, width)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        output = self.layer(self.before(x), *others)
        result: Tensor = self.after(output[0] if isinstance(output, tuple) else output)
        return result


def layer(path: str, *others: Any, **options: Any) -> Made:
    """A layer over [4, 16, 32] between projections."""
    return Inside(new(path, **options), 32), (floats(4, 16, 32), *others)


def text(path: str, length: int = 16, **options: Any) -> Made:
    """A model of 64 tokens, 32 features and two layers."""
    return new(path, num_tokens=64, dim=32, depth=2, **options), (tokens(length),)
