"""Collectives of torch in functional form, which a compiler can record, and whether a tensor is being recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

Tensor = torch.Tensor
_ops = torch.ops._c10d_functional
_RECORDED = (FakeTensor, FunctionalTensor)
_REDUCTIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def is_recorded(t: Tensor) -> bool:
    """Whether a compiler records what happens to this tensor, which has no values.

    A fake tensor alone, as in a caller's FakeTensorMode, is not recorded.
    """
    if type(t) is Tensor or not isinstance(t, _RECORDED):
        return False
    return not isinstance(t, FakeTensor) or _compiles()


def _compiles() -> bool:
    if TracingContext.try_get() is not None:
        return True
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))


def all_reduce(t: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    """The reduction of contiguous tensors."""
    return _waited(_ops.all_reduce(t, _REDUCTIONS[op], group.group_name))


def all_gather(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks one after the other: dim 0 is as often as long."""
    return _waited(_ops.all_gather_into_tensor(t, group.size(), group.group_name))


def reduce_scatter(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along dim 0, of the sum."""
    return _waited(_ops.reduce_scatter_tensor(t, "sum", group.size(), group.group_name))


def all_to_all(t: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The parts for this rank; `received`, `sent`: elements along dim 0 from and to each rank."""
    return _waited(_ops.all_to_all_single(t, list(received), list(sent), group.group_name))


def _waited(t: Tensor) -> Tensor:
    return _ops.wait_tensor(t)  # type: ignore[no-any-return]
