"""Bytes of tensors that are alive, counted by storage: what a memory prediction is held against where there is no
allocator to ask.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from meshwright_planner._torch import DispatchMode, pytree, storage_key


class Counting(DispatchMode):
    """While open, every storage that an operation makes counts until it dies.

    Attributes:
        alive: bytes now.
        peak: most bytes at once since `restart`.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """`known`: tensors that were there before."""
        super().__init__()
        self.alive = self.peak = 0
        self._storages: dict[int, int] = {}
        for tensor in known:
            self.count(tensor)

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it dies."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key is None or key in self._storages or not storage.nbytes() or tensor.is_meta:
            return
        self._storages[key] = storage.nbytes()
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key)

    def restart(self) -> None:
        """Forget the peak."""
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
