"""Decompositions of ops into other ops: those of torch, and some that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import MappingProxyType
from typing import Any

import torch

from meshwright_dtensor._torch.core import TorchDispatchMode

Tensor = torch.Tensor
aten = torch.ops.aten


def trace(x: Tensor) -> Tensor:
    """The sum of the diagonal of a matrix; in torch's decomposition it is a view of all of it."""
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return x.where(rows.unsqueeze(1) == columns, 0).sum()


def trilinear(a: Tensor, b: Tensor, c: Tensor, *dims: Sequence[int]) -> Tensor:
    """The product of tensors of which each lacks the dims in ``dims[:3]``, summed over ``dims[3]``."""
    labels = "abcdefghijkl"[: a.dim() + len(dims[0])]
    terms = ["".join(x for i, x in enumerate(labels) if i not in without) for without in dims[:4]]
    return torch.einsum(f"{terms[0]},{terms[1]},{terms[2]}->{terms[3]}", a, b, c)


def frames(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor | None:
    """``as_strided`` of the rows of a matrix into frames, as torch.stft takes them; None for any other use of memory."""
    if len(size) != 3 or x.dim() != 2 or offset or not x.is_contiguous():
        return None
    inside = size[0] == x.shape[0] and stride[0] == x.shape[1] >= (size[1] - 1) * stride[1] + size[2]
    return x.unfold(1, size[2], stride[1])[:, : size[1]] if inside and stride[2] == 1 else None


OWN: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {aten.trace.default: trace, aten._trilinear.default: trilinear, aten.as_strided.default: frames}
)
"""Op overload -> its decomposition, or None where the op stays as it is."""


class Decomposing(TorchDispatchMode):
    """Runs ops of these names ("aten.trace.default") as torch's decompositions of them into other ops."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._decomp import decomposition_table

        kwargs = kwargs or {}
        with self:
            if func is torch.ops.prims.convert_element_type.default:
                # which has no derivative
                return args[0].to(args[1])
            if str(func) in self.names:
                result = OWN.get(func, decomposition_table.get(func, func))(*args, **kwargs)
                return func(*args, **kwargs) if result is None else result
            implicit = torch._C.DispatchKey.CompositeImplicitAutograd
            if func.namespace == "aten" and func.has_kernel_for_dispatch_key(implicit):
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)
