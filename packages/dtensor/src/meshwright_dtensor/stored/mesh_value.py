"""MeshValue: the DTensor class of gradients and optimizer states."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_like, dtensor_local
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.stage_info import stage_link

Tensor = torch.Tensor


class WholeMemory:
    """Serialisation and memory of tensors over a mesh: those of a plain tensor, where every rank has the whole value."""

    _plain: Tensor | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # kept alive with the tensor: torch.save tells storages apart by their address
        plain: Tensor = whole_local(self, "pickle, torch.save or copy")
        self._plain = (
            torch.nn.Parameter(plain, self.requires_grad) if isinstance(self, torch.nn.Parameter) else plain
        )
        return self._plain.__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        """The address of the value, where every rank has the whole of it."""
        return whole_local(self, "data_ptr").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the value, where every rank has the whole of it."""
        return whole_local(self, "untyped_storage").untyped_storage()


def whole_local(tensor: Any, action: str) -> Tensor:
    """The local tensor, which shares memory, of a value that every rank of the run has whole.

    Raises:
        UnsupportedError: this rank has a part of it, or only its stage of the model.
    """
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names
    placed = {
        names[i]: p for i, p in enumerate(tensor.placements) if mesh.size(i) > 1 and not p.is_replicate()
    }
    staged = stage_link(mesh) is not None
    if placed or staged:
        has = "the parameters of its own stages only" if staged else f"its part only ({placed})"
        raise UnsupportedError(
            f"{action} of a value over a mesh, of shape {list(tensor.shape)}: this rank has {has}. Take "
            "mw.full_state_dict(model), whose values are plain and whole; mw.save(path, model=model, optimizer=optimizer), "
            "which any layout loads; mw.export(path, model=model) for from_pretrained; or value.full_tensor(), which all ranks call"
        )
    return dtensor_local(tensor).detach()


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
