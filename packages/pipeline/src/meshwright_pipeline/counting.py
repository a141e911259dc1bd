"""Losses that average over the targets that count: the mean over a batch from microbatches with unequal numbers of them.

Such a loss (cross entropy with ignored labels) is a sum over targets divided by how many count. Before a step, the rank of
the last stage runs its microbatches with every module skipped, and looks at the targets only. In the step, each microbatch
sums, and divides by its part of the number for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright_dtensor.global_tensor import GlobalTensor

Tensor = torch.Tensor
_SIGNATURES = {
    F.cross_entropy: (
        "input target weight size_average ignore_index reduce reduction label_smoothing".split()
    ),
    F.nll_loss: "input target weight size_average ignore_index reduce reduction".split(),
}


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """By name, of a call that averages over targets that are class numbers; None of any other."""
    names = _SIGNATURES.get(func)
    if names is None:
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given.get("target")
    if given.get("reduction", "mean") != "mean" or given.get("reduce") is False:
        return None
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    return given


def _count(given: dict[str, Any]) -> float:
    target, ignored = given["target"], given.get("ignore_index", -100)
    counts = target != ignored
    weight = given.get("weight")
    number: Tensor
    if weight is None:
        number = counts.sum()
    else:
        number = (weight[torch.where(counts, target, torch.zeros_like(target))] * counts).sum()
    whole = number.full_tensor() if isinstance(number, GlobalTensor) else number
    return float(whole.item())


class Counting(TorchFunctionMode):
    """Takes down how much the targets of each averaging loss count.

    Attributes:
        counts: per call of such a loss.
        ignored: per call, the index that it ignores.
    """

    def __init__(self, skip: bool = False) -> None:
        """`skip`: return a zero in the place of the loss."""
        super().__init__()
        self.skip = skip
        self.counts: list[float] = []
        self.ignored: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _arguments(func, args, kwargs)
        if given is None:
            return func(*args, **kwargs)
        self.ignored.append(given.get("ignore_index", -100))
        if not self.skip:
            return func(*args, **kwargs)
        self.counts.append(_count(given))
        scores = given["input"]
        return torch.zeros((), dtype=scores.dtype, device=scores.device)


class Weighted(TorchFunctionMode):
    """Inside, averaging losses of one microbatch divide by its part of what counts in the whole batch.

    Args:
        divisors: per call of such a loss, that part.
    """

    def __init__(self, divisors: Sequence[float]) -> None:
        super().__init__()
        self.divisors = list(divisors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _arguments(func, args, kwargs)
        if given is None:
            return func(*args, **kwargs)
        given.pop("size_average", None)
        given.pop("reduce", None)
        return func(**{**given, "reduction": "sum"}) / self.divisors.pop(0)


def divisors(counts: Sequence[Sequence[float]]) -> list[float] | None:
    """Per call of a loss its divisor in every microbatch, of what was counted in each; None where all count alike."""
    if all(one == counts[0] for one in counts):
        return None
    return [sum(column) / len(counts) for column in zip(*counts, strict=True)]


def may_differ(tensors: Sequence[Tensor], ignored: Sequence[int]) -> bool:
    """Whether microbatches of a batch may have unequal numbers of targets that count.

    They may where a tensor of whole numbers holds an ignored index, or is a mask that is not the same everywhere.
    """
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
            continue
        whole = tensor.full_tensor() if isinstance(tensor, GlobalTensor) else tensor
        if any(bool((whole == index).any()) for index in set(ignored)):
            return True
        low, high = int(whole.min()), int(whole.max())
        if low == 0 and high == 1:
            return True
    return False
