"""Torch functions that read values before they compute, which do not run on fake tensors, in functions that keep shards."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from meshwright_dtensor._torch.line_by_line import LINE_BY_LINE

Tensor = torch.Tensor
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def equal(input: Tensor, other: Tensor) -> Any:
    """As ``torch.equal``; only whether the parts are equal is communicated."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    return input.shape == other.shape and bool((input == other).all())


def allclose(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
    """As ``torch.allclose``."""
    return bool(torch.isclose(input, other, *args, **kwargs).all())


def cov(input: Tensor, *, correction: int = 1, fweights: None = None, aweights: None = None) -> Any:
    """As ``torch.cov`` of floating-point numbers [variables, observations] without weights."""
    numbers = input.is_floating_point() or input.is_complex()
    if not numbers or input.dim() > 2 or fweights is not None or aweights is not None:
        return NotImplemented
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.t().conj() / max(rows.shape[1] - correction, 0)).squeeze()


def corrcoef(input: Tensor) -> Any:
    """As ``torch.corrcoef`` of floating-point numbers."""
    c = cov(input)
    if c is NotImplemented or not c.dim():
        return c if c is NotImplemented else c / c
    deviations = (c.diagonal().real if c.is_complex() else c.diagonal()).sqrt()
    c = c / deviations.unsqueeze(1) / deviations
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """As ``torch.bincount``: each rank counts its elements. Only the largest and the sums are communicated."""
    fits = (
        input.dim() == 1
        and input.numel()
        and minlength >= 0
        and (weights is None or weights.shape == input.shape)
    )
    if not fits or input.dtype not in _INTEGERS:
        return NotImplemented
    least, most = (int(value) for value in input.aminmax())
    if least < 0:
        return NotImplemented
    wide = torch.float32 if weights is not None and weights.dtype is torch.float32 else torch.float64
    added = torch.ones_like(input, dtype=wide) if weights is None else weights.detach().to(wide)
    zeros = torch.zeros(max(minlength, most + 1), dtype=wide, device=input.device)
    counts = zeros.index_add(0, input.long(), added)
    return counts.long() if weights is None else counts


READERS: MappingProxyType[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {getattr(torch, f.__name__): f for f in (equal, allclose, cov, corrcoef, bincount)}
    | {getattr(Tensor, f.__name__): f for f in (equal, allclose, cov, corrcoef, bincount)}
    | dict(LINE_BY_LINE)
)
"""Function -> the same in other functions, which may return NotImplemented for a call that has to run on gathered values."""
