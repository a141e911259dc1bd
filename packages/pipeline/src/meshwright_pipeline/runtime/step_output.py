"""What a training step returns: its loss, and tensors in the place of other outputs, whose values raise an error that says why."""

from __future__ import annotations

import copy
from typing import Any

import torch

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.staged import Staged
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs
from meshwright_pipeline._torch import pytree, without_subclasses
from meshwright_pipeline.trace.loss import loss_of, plain_or_none

_OF_DTYPE = frozenset("dtype device requires_grad layout is_leaf is_sparse is_quantized is_nested".split())
"""Attributes that do not depend on values or rows."""
_CASTS = frozenset("detach clone contiguous to type float double half bfloat16 cpu cuda".split())
"""Methods whose result is the same output, perhaps in another dtype: frameworks apply them to all that a model returns."""


class DroppedOutput(Staged, torch.Tensor):
    """An output that the last stage has computed by microbatch and has not kept."""

    @staticmethod
    def of(output: torch.Tensor) -> DroppedOutput:
        """In the place of `output`, of a microbatch."""
        return torch.empty_like(output.detach(), device="meta").as_subclass(DroppedOutput)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = getattr(func, "__name__", "a function")
        if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _OF_DTYPE:
            with without_subclasses():
                return func(*args)
        if name in _CASTS and isinstance(args[0], DroppedOutput):
            dtypes = [x for x in (*args[1:], *(kwargs or {}).values()) if isinstance(x, torch.dtype)]
            with without_subclasses():
                cast = getattr(args[0], name)() if name not in ("to", "type", "cpu", "cuda") else args[0]
                return DroppedOutput.of(cast.to(dtypes[0]) if dtypes else cast)
        raise UnsupportedError(
            f"{name} of an output of a training step that a pipeline has not kept: the model computes its loss, so it returns "
            'only that. Set pipeline.outputs to "all" in the plan, let the model add what you need to its loss, or compute the '
            "loss outside (call the model without labels); calls under torch.no_grad() return everything"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DroppedOutput({self.dtype}, not kept by the step of a pipeline)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        return DroppedOutput.__torch_function__(torch.Tensor.copy_, (), (self,))

    __deepcopy__ = __reduce_ex__ = data_ptr = _refuse  # type: ignore[assignment]


def with_loss(result: Any, loss: torch.Tensor, keep: bool) -> Any:
    """The result with another loss. Other tensors are kept with `keep`, otherwise replaced by a `DroppedOutput`."""
    old = loss_of(result)

    def replaced(leaf: Any) -> Any:
        if leaf is old:
            return loss
        if not isinstance(leaf, torch.Tensor):
            return plain_or_none(leaf)
        return leaf if keep else DroppedOutput.of(leaf)

    leaves, spec = pytree.tree_flatten(result)
    if any(leaf is old for leaf in leaves):
        return pytree.tree_unflatten([replaced(leaf) for leaf in leaves], spec)
    # an object that pytree does not know
    changed = copy.copy(result)
    for name, value in getattr(result, "__dict__", {}).items():
        setattr(changed, name, pytree.tree_map_only(torch.Tensor, replaced, value))
    changed.loss = loss
    return changed
