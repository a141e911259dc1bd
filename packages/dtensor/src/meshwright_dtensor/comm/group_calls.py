"""Collectives of one process group as functions of a local tensor; while a compiler records, in functional form."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright_dtensor._torch import functional, groups
from meshwright_dtensor.devices.waits import waiting

Tensor = torch.Tensor


class Recorded(threading.local):
    """The collectives that a compiler records in this thread, in their order: (operation, group, elements of the local input).

    Attributes:
        calls: None while nobody asks.
    """

    calls: list[tuple[str, str, int]] | None = None


RECORDED = Recorded()
"""Torch functions carry no context, so it is kept per thread."""


def all_reduce(
    t: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """The reduction over the ranks, contiguous."""
    return all_reduce_(t.clone(memory_format=torch.contiguous_format), group, op)


def all_reduce_(
    t: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """The reduction over the ranks: contiguous `t` itself, which is overwritten, or another tensor while a compiler records."""
    if type(t) is not Tensor and _is_recorded("all_reduce", t, group):
        return functional.all_reduce(t, op, group)
    with waiting():
        groups.all_reduce_(t, op, group)
    return t


def all_gather(t: Tensor, group: dist.ProcessGroup, shape: Sequence[int] | None = None) -> Tensor:
    """[...] of each rank -> [ranks, ...], or as many elements in another shape: no view, since autograd takes no write to one."""
    shape = [group.size(), *t.shape] if shape is None else shape
    if _is_recorded("all_gather_into_tensor", t, group):
        return functional.all_gather(t.contiguous()[None], group).view(shape)
    out = t.new_empty(shape)
    with waiting():
        dist.all_gather_single(out.view(-1), t.contiguous().view(-1), group=group)
    return out


def reduce_scatter(t: Tensor, group: dist.ProcessGroup, shape: Sequence[int]) -> Tensor:
    """[ranks * n], contiguous -> the sum of this rank's part, n elements in this shape."""
    if _is_recorded("reduce_scatter_tensor", t, group):
        return functional.reduce_scatter(t, group).view(shape)
    out = t.new_empty(shape)
    with waiting():
        dist.reduce_scatter_single(out.view(-1), t, group=group)
    return out


def all_to_all(t: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[sum(sent)] -> [sum(received)]: the parts of `t` go to the ranks in order, and theirs arrive in order."""
    if _is_recorded("all_to_all_single", t, group):
        return functional.all_to_all(t, received, sent, group)
    out = t.new_empty(sum(received))
    with waiting():
        dist.all_to_all_single(out, t, list(received), list(sent), group=group)
    return out


def _is_recorded(operation: str, t: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a compiler records this collective; it is noted then."""
    if not functional.is_recorded(t):
        return False
    if RECORDED.calls is not None:
        RECORDED.calls.append((operation, group.group_name, t.numel()))
    return True
