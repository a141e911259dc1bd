"""What a training step returns: its loss, and tensors in the place of other outputs, whose values raise an error that says why."""

from __future__ import annotations

import copy
from typing import Any

import torch

from meshwright_dtensor.devices import moves
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.staged import Staged
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs
from meshwright_pipeline._torch import pytree, without_subclasses
from meshwright_pipeline.trace.loss import loss_of, plain_or_none

_OF_DTYPE = frozenset("dtype requires_grad layout is_leaf is_sparse is_quantized is_nested".split())
"""Attributes that do not depend on values or rows."""
_CASTS = frozenset("detach clone contiguous to float double half bfloat16 cpu cuda".split())
"""Methods whose result is the same output, perhaps in another dtype: frameworks apply them to all that a model returns."""


NOT_KEPT = (
    "an output of a training step that a pipeline has not kept: the model computes its loss, so it returns "
    'only that. Set pipeline.outputs to "all" in the plan, let the model add what you need to its loss, or compute the '
    "loss outside (call the model without labels); calls under torch.no_grad() return everything"
)


class DroppedOutput(Staged, torch.Tensor):
    """An output that the last stage has computed by microbatch and has not kept, or that each stage has left for itself."""

    _device: torch.device
    _why: str

    @staticmethod
    def of(output: torch.Tensor, device: torch.device, why: str = NOT_KEPT) -> DroppedOutput:
        """In the place of `output`, of a microbatch. `why` it is not there, and what to do."""
        dropped = torch.empty_like(output.detach(), device="meta").as_subclass(DroppedOutput)
        dropped._device, dropped._why = device, why
        return dropped

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = getattr(func, "__name__", "a function")
        if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _OF_DTYPE:
            with without_subclasses():
                return func(*args)
        if name in _CASTS and isinstance(args[0], DroppedOutput):
            given = [*args[1:], *(kwargs or {}).values()]
            dtypes = [x.dtype if isinstance(x, torch.Tensor) else x for x in given]
            dtypes = [x for x in dtypes if isinstance(x, torch.dtype)]
            with without_subclasses():
                cast = args[0] if moves(name) else getattr(args[0], name)()
                return DroppedOutput.of(cast.to(dtypes[0]) if dtypes else cast, args[0]._device, args[0]._why)
        why = next(
            (x._why for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DroppedOutput)), NOT_KEPT
        )
        raise UnsupportedError(f"{name} of {why}")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the outputs of the model."""
        return self._device

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
        return leaf if keep else DroppedOutput.of(leaf, loss.device)

    leaves, spec = pytree.tree_flatten(result)
    if any(leaf is old for leaf in leaves):
        return pytree.tree_unflatten([replaced(leaf) for leaf in leaves], spec)
    # an object that pytree does not know, which may be frozen
    changed = copy.copy(result)
    slots = [getattr(kind, "__slots__", ()) for kind in type(result).__mro__]
    names = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
    for name in (*getattr(result, "__dict__", {}), *names):
        if hasattr(result, name):
            value = pytree.tree_map_only(torch.Tensor, replaced, getattr(result, name))
            object.__setattr__(changed, name, value)
    object.__setattr__(changed, "loss", loss)
    return changed
