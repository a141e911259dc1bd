"""Bytes of live tensors, counted by storage: to check memory predictions on devices without allocator statistics."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from meshwright_planner._torch import DispatchMode, pytree, storage_key


class Counting(DispatchMode):
    """Counts the bytes of every storage that an operation makes, while it is alive.

    Attributes:
        alive: bytes now.
        peak: maximum since `restart`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """`tensors`: tensors that exist already."""
        super().__init__()
        self.alive = self.peak = 0
        self._storages: dict[int, int] = {}
        for tensor in tensors:
            self.count(tensor)

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor while it is alive."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key is None or key in self._storages or not storage.nbytes() or tensor.is_meta:
            return
        self._storages[key] = storage.nbytes()
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key)

    def restart(self) -> None:
        """Reset the peak."""
        self.peak = self.alive

    def _gone(self, key: int) -> None:
        self.alive -= self._storages.pop(key, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return out
