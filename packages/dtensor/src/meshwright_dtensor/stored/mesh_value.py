"""MeshValue: the DTensor class of gradients and optimizer states."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_like, dtensor_local
from meshwright_dtensor.stored.serialization import WholeMemory

Tensor = torch.Tensor


class MeshValue(WholeMemory, DTensor):
    """A DTensor computed from parameters and gradients outside of autograd, never partial when it is read."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copy = mesh_value(dtensor_like(dtensor_local(self).detach().clone(), self))
        memo[id(self)] = copy
        return copy


def mesh_value(dtensor: DTensor) -> DTensor:
    """The same object, as a :class:`MeshValue` where it is a stock DTensor that is no part of an autograd graph."""
    if type(dtensor) is DTensor and not dtensor.requires_grad:
        dtensor.__class__ = MeshValue
    return dtensor
