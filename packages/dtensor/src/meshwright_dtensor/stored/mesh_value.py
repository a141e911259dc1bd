"""MeshValue: the DTensor class of gradients and optimizer states."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch import core
from meshwright_dtensor.stored.serialization import WholeMemory

Tensor = torch.Tensor


class MeshValue(WholeMemory, DTensor):
    """A DTensor computed from parameters and gradients outside of autograd, never partial when it is read.

    `requires_grad_()` makes it a leaf, as the local tensor inside is: functions of it run as on global tensors.
    """

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether autograd records what is computed from it."""
        return core.dtensor_local(self).requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value != self.requires_grad:
            # not the memory's other tensors
            core.set_dtensor_parts(
                self, core.dtensor_local(self).detach().requires_grad_(value), core.dtensor_spec(self)
            )

    def requires_grad_(self, requires_grad: bool = True) -> MeshValue:
        """Switch the gradient on or off."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient of a leaf; it shares memory with that of the local tensor."""
        local = core.dtensor_local(self).grad
        return None if local is None else mesh_value(core.dtensor_like(local.detach(), self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        core.dtensor_local(self).grad = None if value is None else core.dtensor_local(value)  # type: ignore[arg-type]

    def to_local(self, **options: Any) -> Tensor:
        """This rank's part, recorded by autograd."""
        local = core.dtensor_local(self)
        return local.view_as(local) if self.requires_grad else super().to_local(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copy: Any = mesh_value(core.dtensor_like(core.dtensor_local(self).detach().clone(), self))
        copy.requires_grad = self.requires_grad
        if isinstance(self, torch.nn.Parameter):
            core.mark_as_parameter(copy)
        memo[id(self)] = copy
        return copy  # type: ignore[no-any-return]


def mesh_value(dtensor: DTensor) -> DTensor:
    """The same object, as a :class:`MeshValue` where it is a stock DTensor that is no part of an autograd graph."""
    if type(dtensor) is DTensor and not dtensor.requires_grad:
        dtensor.__class__ = MeshValue
    return dtensor
