"""Placeholders for the modules and parameters of other stages: they have shapes, and errors that say where the values are.

Torch's own errors would speak of the meta device or of a shape. Whatever works on meta tensors still works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stages.stage_tensor import StageValue
from meshwright_dtensor.tensor.staged import Staged
from meshwright_dtensor.utils.names import listing
from meshwright_pipeline._torch import without_subclasses
from meshwright_pipeline.pytrees import tensors_of
from meshwright_pipeline.trace.forward_hooks import signature_of
from meshwright_pipeline.trace.meta_model import move_to_meta

_SHAPE_ONLY = frozenset("view_as expand_as reshape_as type_as to is_same_size".split())
"""Functions of two tensors that take the shape, dtype or device of the second."""


class Placeholder(Staged, torch.Tensor):
    """A meta tensor in place of a parameter or buffer of another stage, or computed from one."""

    _what: str

    @staticmethod
    def of(meta: torch.Tensor, what: str) -> Placeholder:
        """`meta` with this description."""
        placeholder = meta.as_subclass(Placeholder)
        placeholder._what = what
        return placeholder

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run on the meta device. An error there says where the value is. Raises UnsupportedError: the value is needed."""
        first = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Placeholder)), None)
        what = "a value of another stage" if first is None else first._what
        try:
            with without_subclasses():
                valued = any(x.dim() and not x.is_meta for x in tensors_of((args, kwargs)))
                # torch would read memory that is not there
                if valued and getattr(func, "__name__", "") not in _SHAPE_ONLY:
                    raise NotImplementedError("another operand has a value")
                result = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"{what}: here it has a shape and no value, and {getattr(func, '__name__', 'a function')} needs one. Read it on a "
                "rank whose named_parameters() have it, or save the whole model (save, export) and read it there"
            ) from error
        if type(result) is torch.Tensor and result.is_meta:
            return Placeholder.of(result, what)
        return result


def replace_unit(
    model: nn.Module,
    unit: str,
    rank: int,
    holders: Mapping[str, tuple[int, ...]],
    kept: Collection[nn.Module] = (),
) -> None:
    """Replace the parameters and buffers of a unit of another stage by placeholders. Calling the unit is then an error.

    Args:
        rank: of the axis.
        holders: name of a parameter -> ranks of the axis that hold it.
        kept: modules that units of this rank's stages have too.
    """
    module = model.get_submodule(unit)
    ranks = next((ranks for name, ranks in holders.items() if name.startswith(f"{unit}.")), ())
    where = f"rank {rank} of the pipeline does not hold, rank {listing(map(str, ranks))} does"

    def placeholder(name: str, meta: torch.Tensor) -> torch.Tensor:
        return Placeholder.of(meta, f"{unit}.{name} is what {where}")

    guarded = {
        path: part
        for path, part in module.named_modules()
        if part not in kept and (part is module or any(True for _ in part.parameters(recurse=False)))
    }
    move_to_meta(module, placeholder, kept)
    if not ranks:
        return
    for path, part in guarded.items():
        name = f"{unit}.{path}" if path else unit
        part.__dict__["forward"] = _refusing(name, where, part)


def _refusing(name: str, where: str, part: nn.Module) -> Callable[..., Any]:
    forward = part.forward

    def refuse(*args: Any, **kwargs: Any) -> Any:
        # a call for shapes alone: wrappers that users put around a forward also run on meta tensors
        # outside of the call of the model, every rank computes with values of stages
        shown = any(isinstance(tensor, StageValue) for tensor in part.parameters())
        if shown or all(tensor.is_meta for tensor in tensors_of((args, kwargs))):
            return forward(*args, **kwargs)
        raise UnsupportedError(
            f"module {name!r} was called outside of the call of its model, and it is what {where}: a pipelined model runs only in "
            "model(...), where every rank runs its own stages. Let forward of the model do what is wanted (selected by an "
            "argument, say), or plan without pp"
        )

    signature = signature_of(forward)
    # models inspect the parameters of forward
    if signature is not None:
        refuse.__signature__ = signature  # type: ignore[attr-defined]
    return refuse
