"""On accelerators, dropout and attention with dropout draw their masks inside of fused kernels, which no replay can reach.

Inside of `ExplicitDraws` they draw the same mask by an operation of its own, and use it.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright_dtensor import dropout_noise
from meshwright_dtensor._torch.core import on_checkpointing
from meshwright_dtensor._torch.line_by_line import LINE_BY_LINE
from meshwright_dtensor._torch.modes import with_function_modes
from meshwright_dtensor.devices import device_of, on_host
from meshwright_dtensor.rules.composites.sdpa_blocks import attention
from meshwright_dtensor.sharding.boxes import dim_order_of, has_gaps, strides_of

Tensor = torch.Tensor


def explicit_draws(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """`ExplicitDraws` where the kernels of `device` need it."""
    if on_host(device):
        return contextlib.nullcontext()
    # the model's own activation checkpoints
    on_checkpointing(with_function_modes)
    return ExplicitDraws(device.type)


class ExplicitDraws(TorchFunctionMode):
    """Inside, ordinary tensors are dropped out by a mask that an operation of its own draws, as the fused kernel would.

    `kind`: type of the model's device, also where its shapes alone are computed.
    """

    in_second_runs = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # values over a mesh have rules of their own
        if all(kind is Tensor for kind in types):
            if func in (F.dropout, torch.dropout) and device_of(self.kind).fused_dropout:
                return _dropout(func, args, kwargs)
            if func is F.scaled_dot_product_attention:
                return _attention(self.kind, *args, **kwargs)
            if func in LINE_BY_LINE:
                # torch took the mode off for this call
                with self:
                    return LINE_BY_LINE[func](*args, **kwargs)
        return func(*args, **kwargs)


_DROPOUT = inspect.signature(F.dropout)
_FUSED = inspect.signature(lambda input, p, train: None)


def _dropout(func: Any, args: Any, kwargs: Any) -> Tensor:
    if func is F.dropout:
        x, p, training, inplace = _bound(_DROPOUT, args, kwargs)
    else:
        (x, p, training), inplace = _bound(_FUSED, args, kwargs), False
    # in place it is not fused
    if not training or inplace or not 0.0 < p < 1.0 or not x.numel():
        result: Tensor = func(*args, **kwargs)
        return result
    shape = tuple(x.shape)
    noise = torch.empty_like(x.detach())
    if has_gaps(x, shape):
        noise = noise.new_empty_strided(shape, strides_of(shape, dim_order_of(noise), True))
    return x * dropout_noise.dropout_noise_(noise, p)


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Any, ...]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def _attention(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # as torch's own does
        half = torch.get_autocast_dtype(kind)
        query, key, value = (t.to(half) for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(half)
    noise = torch.empty((*query.shape[:-1], key.shape[-2]), dtype=query.dtype, device=query.device)
    sizes = (key.shape[-3] if key.dim() > 2 else 1, key.shape[-1], value.shape[-1])
    tensors = (query, key, value, attn_mask)
    # zeros that stand for values when a model is profiled do not require grad
    dropout_noise.attention_noise_(noise, dropout_p, tensors, sizes, is_causal, scale, grad=True)
    return attention(query, key, value, attn_mask, noise, is_causal, scale, enable_gqa)
