"""Dropout masks as accelerators draw them: in fused kernels, which use the random stream in ways of their own.

The masks are torch operations that write to their first argument, so that a dispatch mode sees them as it sees
``bernoulli_``, whatever kernels run below.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from meshwright_dtensor._torch import attention as kernels
from meshwright_dtensor.devices import device_of
from meshwright_dtensor.errors import UnsupportedError

Tensor = torch.Tensor

_HALF = (torch.float16, torch.bfloat16)
_SCHEMAS = (
    "dropout_noise_(Tensor(a!) self, float p) -> Tensor(a!)",
    "attention_noise_(Tensor(a!) self, float p, int[] sizes, ScalarType dtype, int[]? mask, ScalarType? mask_dtype, "
    "bool[] dense, bool causal, float? scale, bool grad) -> Tensor(a!)",
)


@cache
def noise_ops() -> Any:
    """The operations `dropout_noise_` and `attention_noise_`, defined on first use: their library has to stay alive."""
    library = torch.library.Library("meshwright", "DEF")
    for schema in _SCHEMAS:
        library.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
    for name, kernel in (("dropout_noise_", _dropout_noise_), ("attention_noise_", _attention_noise_)):
        library.impl(name, kernel, "CompositeExplicitAutograd")
        library.impl(name, lambda self, *_: self, "Meta")
    return torch.ops.meshwright, library


def dropout_noise_(full: Tensor, p: float) -> Tensor:
    """Fill with 0 or 1 / (1 - p), as ``torch.dropout`` of a tensor with the strides of `full` draws it on its accelerator."""
    result: Tensor = noise_ops()[0].dropout_noise_(full, p)
    return result


def attention_noise_(
    full: Tensor,
    p: float,
    tensors: Sequence[Tensor | None],
    sizes: Sequence[int],
    causal: bool,
    scale: float | None,
    grad: bool | None = None,
) -> Tensor:
    """Fill `full` [..., h, l, s] with 0 or 1 / (1 - p), as attention with this dropout draws it on its accelerator.

    Args:
        tensors: queries, keys, values and mask (None without one), or parts of them.
        sizes: heads of the keys, features of queries and keys, features of the values, of the whole tensors.
        grad: whether the queries require grad on one device, by default as they do here.

    Raises UnsupportedError: torch chooses a kernel whose mask cannot be had.
    """
    q, _, _, mask = tensors
    assert q is not None
    mask = None if mask is None else torch.atleast_2d(mask)
    dtype, of_mask = q.dtype, None if mask is None else mask.dtype
    kind = full.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        of_mask = dtype if of_mask is not None and of_mask.is_floating_point else of_mask
    # a mask of one row is broadcast: the rows of a microbatch are not those of the batch
    shape = (
        None
        if mask is None
        else [1] * (mask.dim() - 2) + [full.shape[d] if mask.shape[d] > 1 else 1 for d in (-2, -1)]
    )
    # kernels want the elements of a row side by side; zeros that stand for values have no strides
    dense = [t is None or t.stride(-1) in (0, 1) for t in tensors]
    op = noise_ops()[0].attention_noise_
    grad = q.requires_grad if grad is None else grad
    result: Tensor = op(full, p, list(sizes), dtype, shape, of_mask, dense, causal, scale, grad)
    return result


def _dropout_noise_(full: Tensor, p: float) -> Tensor:
    # of tensors with gaps, the kernels draw each number elsewhere
    return full.copy_(torch.native_dropout(full.fill_(1), p, True)[0])


def _math_noise_(full: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    # half precision is computed in float32 there
    like = torch.ones(full.shape, dtype=torch.float32 if dtype in _HALF else dtype, device=full.device)
    if not device_of(full.device).fused_dropout:
        return full.copy_(like.bernoulli_(1 - p).div_(1 - p))
    return full.copy_(torch.native_dropout(like, p, True)[0])


def _attention_noise_(
    full: Tensor,
    p: float,
    sizes: Sequence[int],
    dtype: torch.dtype,
    mask: Sequence[int] | None,
    mask_dtype: torch.dtype | None,
    dense: Sequence[bool],
    causal: bool,
    scale: float | None,
    grad: bool,
) -> Tensor:
    if full.dim() < 4:
        return _math_noise_(full, p, dtype)
    *batch, heads, rows, columns = full.shape
    key_heads, features, of_values = sizes
    shapes = [
        (*batch, heads, rows, features),
        (*batch, key_heads, columns, features),
        (*batch, key_heads, columns, of_values),
        *([] if mask is None else [tuple(mask)]),
    ]
    dtypes = (dtype, dtype, dtype, mask_dtype)
    q, k, v, *masks = (
        torch.zeros(shape if by_rows else (*shape[:-2], shape[-1], shape[-2]), dtype=kind, device=full.device)
        for shape, kind, by_rows in zip(shapes, dtypes, dense, strict=False)
    )
    q, k, v, *masks = (
        t if by_rows else t.transpose(-2, -1) for t, by_rows in zip((q, k, v, *masks), dense, strict=False)
    )
    q.requires_grad_(grad)
    bias = masks[0] if masks else None
    with torch.set_grad_enabled(grad):
        kernel = kernels.chosen(q, k, v, bias, p, causal, scale)
    with torch.no_grad():
        if kernel == kernels.MATH:
            return _math_noise_(full, p, dtype)
        if kernel == kernels.EFFICIENT:
            return full.copy_(
                kernels.efficient_kept(full, p, device_of(full.device).generator(full.device))
            ).div_(1 - p)
        if kernel == kernels.FLASH:
            return full.copy_(kernels.flash_kept(q, k, v, p, causal, scale)).div_(1 - p)
    raise UnsupportedError(
        f"attention with dropout {p} of {dtype} {list(q.shape)} on {full.device.type} runs in torch's kernel {kernel}, whose mask "
        "cannot be had, so that shards would not train as one device does; choose another kernel "
        "(torch.backends.cuda.enable_cudnn_sdp(False)), or set the dropout of attention to 0"
    )
