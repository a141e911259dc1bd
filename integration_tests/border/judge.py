"""Whether what a parallel model gave is what the model of one device gave."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RELATIVE, ABSOLUTE = 2e-5, 4e-6
KEPT = (str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type, bytes)


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as numbers of one device: tensors are whole and plain, objects of other classes are their names (collective)."""
    if isinstance(value, Tensor):
        whole: Any = value.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if type(whole) is not Tensor:
            whole = whole.as_subclass(Tensor)
        kinds = (bool(value.requires_grad), isinstance(value, nn.Parameter))
        return ("tensor", tuple(value.shape), str(value.dtype), kinds, whole.clone())
    if isinstance(value, KEPT):
        return value
    if isinstance(value, numbers.Number):
        return value
    if isinstance(value, np.ndarray):
        return ("array", torch.from_numpy(value.copy()))
    if depth > 6:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, (str, int)) else i: plain(x, depth + 1)
            for i, (key, x) in enumerate(value.items())
        }
    if isinstance(value, (list, tuple, Iterator, type({}.values()), type({}.keys()), type({}.items()))):
        return [plain(x, depth + 1) for x in value]
    if isinstance(value, nn.Module):
        return [type(value).__name__, plain(list(value.parameters()), depth + 1)]
    return f"<{type(value).__name__}>"


def difference(got: Any, wanted: Any) -> str:
    """How `got` differs from `wanted`, both made by `plain`; nothing if it does not."""
    if isinstance(wanted, Tensor):
        if not isinstance(got, Tensor):
            return f"{_short(got)} for a tensor"
        return _of_tensors(got, wanted)
    if isinstance(wanted, dict):
        if not isinstance(got, dict) or list(got) != list(wanted):
            return f"keys {_short(got)} for {_short(list(wanted))}"
        return next((f"{key}: {told}" for key, x in wanted.items() if (told := difference(got[key], x))), "")
    if isinstance(wanted, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(wanted):
            return f"{_short(got)} for {_short(wanted)}"
        return next((told for a, b in zip(got, wanted, strict=True) if (told := difference(a, b))), "")
    if isinstance(wanted, (float, complex)) and isinstance(got, (float, complex)):
        return _of_tensors(torch.tensor(got), torch.tensor(wanted))
    same = type(got) is type(wanted) and got == wanted
    return "" if same else f"{_short(got)} for {_short(wanted)}"


def _of_tensors(got: Tensor, wanted: Tensor) -> str:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype} {list(got.shape)} for {wanted.dtype} {list(wanted.shape)}"
    if got.layout != wanted.layout or got.is_quantized != wanted.is_quantized:
        return f"{got.layout} for {wanted.layout}"
    if wanted.layout != torch.strided:
        got, wanted = got.to_dense(), wanted.to_dense()
    if wanted.is_quantized:
        got, wanted = got.dequantize(), wanted.dequantize()
    loose = 400 if wanted.dtype in (torch.float16, torch.bfloat16) else 1
    if wanted.is_complex() or wanted.is_floating_point():
        # sums of large numbers are rounded by more
        scale = max(1.0, float(wanted.detach().abs().nan_to_num(0, 0, 0).max())) if wanted.numel() else 1.0
        if torch.allclose(got, wanted, RELATIVE * loose, ABSOLUTE * loose * scale, equal_nan=True):
            return ""
    elif torch.equal(got, wanted):
        return ""
    return f"{_short(got.flatten()[:4].tolist())} for {_short(wanted.flatten()[:4].tolist())}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else text[:117] + "..."
