"""What pickle, torch.save and copy write of stored tensors: a plain tensor where every rank has the whole value, else an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright_dtensor._torch.core import dtensor_local
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.stage_info import stage_link
from meshwright_dtensor.tensor.unheard import Unheard

Tensor = torch.Tensor


def _of_whole(name: str) -> Callable[[Any], Any]:
    return lambda tensor: getattr(whole_local(tensor, name), name)()


class WholeMemory(Unheard):
    """Serialisation and memory of tensors over a mesh: those of a plain tensor, where every rank has the whole value."""

    _plain: Tensor | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # kept alive with the tensor: torch.save tells storages apart by their address
        plain: Tensor = whole_local(self, "pickle, torch.save or copy")
        self._plain = (
            torch.nn.Parameter(plain, self.requires_grad) if isinstance(self, torch.nn.Parameter) else plain
        )
        return self._plain.__reduce_ex__(protocol)

    # the memory of the value, where every rank has the whole of it
    data_ptr = _of_whole("data_ptr")
    storage = _of_whole("storage")
    untyped_storage = _of_whole("untyped_storage")


def whole_local(tensor: Any, action: str) -> Tensor:
    """The local tensor, which shares memory, of a value that every rank of the run has whole.

    Raises UnsupportedError: this rank has a part of it, or only its stage of the model.
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
            "mw.full_state_dict(model), whose values are plain and whole (on rank 0, save_pretrained(path, state_dict=...) takes "
            "them); mw.save(path, model=model, optimizer=optimizer), which any layout loads; mw.export(path, model=model) for "
            "from_pretrained; or value.full_tensor(), which all ranks call"
        )
    return dtensor_local(tensor).detach()
