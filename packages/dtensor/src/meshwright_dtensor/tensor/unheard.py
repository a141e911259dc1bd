"""Methods of all tensors over a mesh: those that torch runs without asking ``__torch_function__``, and some with one answer."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from meshwright_dtensor.errors import UnsupportedError

Tensor = torch.Tensor


def _written_by(part: Any, take: Any) -> property:
    """The attribute ``part`` of a tensor, which is assigned by a write to ``take`` of it."""

    def write(x: Any, value: Any) -> None:
        take(x).copy_(value)

    return property(part.__get__, write)


def _refused(why: str) -> Any:
    """A method that raises UnsupportedError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(why)

    return refuse


class Unheard:
    """Base of tensor classes over a mesh: methods that would otherwise tell of the memory of this rank."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # opt_einsum and its like take the functions of the package that the class of an array is from, else those of NumPy
        cls.__module__ = torch.__name__

    real = _written_by(torch.Tensor.real, torch.real)
    imag = _written_by(torch.Tensor.imag, torch.imag)

    def __format__(self, spec: str) -> str:
        # models look modules up by f"expert_{index}"; f"{loss}" on one rank only must not wait for other ranks
        x: Any = self
        everywhere = all(p.is_replicate() for p in getattr(x, "placements", ())) and not hasattr(x, "holders")
        if x.dim() == 0 and (spec or everywhere):
            return x.detach().item().__format__(spec)  # type: ignore[no-any-return]
        return object.__format__(self, spec)

    def module_load(self, other: Any, assign: bool = False) -> Any:
        """What ``load_state_dict`` puts in the place of this tensor, if it swaps tensors: a detached one."""
        return other.detach() if assign else self.copy_(other).detach()  # type: ignore[attr-defined]

    set_ = _refused(
        "set_ gives a tensor other memory, and a tensor over a mesh has its part of a value in memory of its own; write the new "
        "value with x.copy_(value)"
    )
    storage_offset = _refused(
        "storage_offset asks for a place in the storage of a global tensor, a parameter or a gradient, which holds this rank's "
        "part only; use x.to_local() for the part or x.full_tensor() for the whole value"
    )
    as_subclass = _refused(
        "as_subclass of a tensor over a mesh: another class would take this rank's part for the whole; use x.full_tensor()"
    )
