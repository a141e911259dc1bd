"""What a rank has of the modules that other ranks hold: shapes that may be asked for, and errors that say where the rest is.

Torch's own errors would speak of the meta device, or of a shape. What works on meta tensors goes on working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.utils.names import listing
from meshwright_pipeline._torch import stock_call
from meshwright_pipeline.pytrees import tensors_of
from meshwright_pipeline.trace.forward_hooks import signature_of
from meshwright_pipeline.trace.meta_model import move_to_meta


class Elsewhere(torch.Tensor):
    """A meta tensor in the place of a parameter or buffer that other ranks hold, or what was made of such."""

    _what: str

    @staticmethod
    def of(meta: torch.Tensor, what: str) -> Elsewhere:
        """`meta` under this description."""
        found = meta.as_subclass(Elsewhere)
        found._what = what
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As on the meta device; what fails there says where the value is.

        Raises:
            UnsupportedError: the value is needed.
        """
        if any(not issubclass(cls, kind) for kind in types):
            return NotImplemented  # values over a mesh have a way of their own
        first = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Elsewhere)), None)
        what = "a value of another stage" if first is None else first._what
        try:
            with stock_call():
                result = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"{what}: here it has a shape and no value, and {getattr(func, '__name__', 'a function')} needs one. Read it on a "
                "rank whose named_parameters() have it, or save the whole model (save, export) and read it there"
            ) from error
        if type(result) is torch.Tensor and result.is_meta:
            return Elsewhere.of(result, what)
        return result


def leave(model: nn.Module, unit: str, rank: int, holders: Mapping[str, tuple[int, ...]]) -> None:
    """Take out of `model` what this rank does not hold of a unit, parameters and buffers; a call of it is then an error.

    Args:
        rank: of the axis.
        holders: name of a parameter -> ranks of the axis that hold it.
    """
    module = model.get_submodule(unit)
    where = next((ranks for name, ranks in holders.items() if name.startswith(f"{unit}.")), ())
    here = f"rank {rank} of the pipeline does not hold, rank {listing(map(str, where))} does"

    def left(name: str, meta: torch.Tensor) -> torch.Tensor:
        return Elsewhere.of(meta, f"{unit}.{name} is what {here}")

    holding = {path: part for path, part in module.named_modules() if _holds(part) or part is module}
    move_to_meta(module, left)
    if not where:
        return
    for path, part in holding.items():
        name = f"{unit}.{path}" if path else unit
        part.__dict__["forward"] = _refusing(name, here, part.forward)


def _holds(part: nn.Module) -> bool:
    return any(True for _ in part.parameters(recurse=False))


def _refusing(name: str, here: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if all(tensor.is_meta for tensor in tensors_of((args, kwargs))):
            return forward(
                *args, **kwargs
            )  # it is asked for shapes: code that users put around a forward is not copied
        raise UnsupportedError(
            f"module {name!r} was called outside of the call of its model, and it is what {here}: a pipelined model runs in "
            "model(...) alone, where every rank runs its own stages. Let forward of the model do what is wanted (behind an "
            "argument, say), or plan without pp"
        )

    known = signature_of(forward)
    if known is not None:  # models look at the parameters of forward
        refuse.__signature__ = known  # type: ignore[attr-defined]
    return refuse
