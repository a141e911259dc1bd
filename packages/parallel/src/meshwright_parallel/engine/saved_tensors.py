"""Saved-tensor hooks for unsharded parameters: autograd saves where a parameter is, not its memory.

Without them, the graph would keep every unshard buffer until the backward pass. A saved tensor that is a view of the buffer
of a parameter group is kept as a `SavedView`. Reading it unshards the group again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright_parallel._torch.core import storage_key
from meshwright_parallel.engine.param_group import UnshardedParameter, Unsharder


@dataclass(slots=True)
class SavedView:
    """A view of an unsharded parameter in the buffer of its group, without the memory."""

    parameter: UnshardedParameter
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """The pair of hooks, in force during a forward."""

    def __init__(self, engine: Unsharder) -> None:
        self.engine = engine
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return a SavedView, or (tensor, version) for a tensor outside of all unshard buffers."""
        # a wrapper that activation checkpointing saves
        if type(tensor) is not torch.Tensor:
            return tensor, None
        group = self.engine.storages.get(storage_key(tensor))
        if group is None or tensor.dtype != group.dtype:
            # detach(): a node may save its own result, a cycle that the garbage collector does not see.
            # The version is kept because torch checks versions only where there are no hooks.
            return tensor.detach(), tensor._version
        offset = int(tensor.storage_offset())
        parameter = group.parameter_at(offset)
        return SavedView(parameter, parameter.version, tensor.shape, tensor.stride(), offset)

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor that was saved. Raises RuntimeError: it was written to since, as autograd raises without hooks."""
        if type(saved) is tuple:
            tensor, version = saved
            if version is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
                )
            return tensor  # type: ignore[no-any-return]
        group = saved.parameter.group
        self.engine.unshard_for_backward(group)
        if saved.parameter.version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a parameter of {group.name or 'the model'!r} was changed between forward and backward"
            )
        return group.buffer.as_strided(saved.shape, saved.stride, saved.offset)  # type: ignore[no-any-return]
