"""What autograd saves while gathered parameters are used: not their memory, but where to gather it again.

Without this, the graph would keep every gathered buffer until the backward pass.  A saved tensor that lies in the buffer
of a unit is remembered as a view into it; reading it gathers the unit on demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from meshwright_parallel._torch.core import storage_key

if TYPE_CHECKING:
    from meshwright_parallel.engine.param_group import Copy
    from meshwright_parallel.engine.unshard import Gathering


@dataclass(slots=True)
class SavedView:
    """A view of a compute copy in the buffer of its unit, without the memory."""

    copy: Copy
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """The pair of hooks, installed around a forward."""

    def __init__(self, engine: Gathering) -> None:
        self.engine = engine
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """A saved tensor as what is kept of it."""
        if type(tensor) is not torch.Tensor:  # a wrapper that a checkpoint keeps
            return tensor, None
        unit = self.engine.storages.get(storage_key(tensor))
        if unit is None or tensor.dtype != unit.dtype:
            # the tensor itself may be the result of the node that saves it: a circle that no garbage collector sees
            return tensor.detach(), tensor._version  # torch checks versions only where there are no hooks
        offset = int(tensor.storage_offset())
        copy = unit.copy_at(offset)
        return SavedView(copy, copy.version, tensor.shape, tensor.stride(), offset)

    def unpack(self, kept: Any) -> torch.Tensor:
        """What was saved."""
        if type(kept) is tuple:
            tensor, version = kept
            if version is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
                )
            return tensor  # type: ignore[no-any-return]
        unit = kept.copy.unit
        self.engine.backward_reaches(unit)
        if kept.copy.version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a parameter of {unit.name or 'the model'!r} was changed between forward and backward"
            )
        return unit.buffer.as_strided(kept.shape, kept.stride, kept.offset)  # type: ignore[no-any-return]
