"""Bytes of tensors that are alive in a real step on one rank: what tests hold predictions against."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_planner._torch import pytree, storage_key


class Counting(TorchDispatchMode):
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


def counted(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Most bytes at once in the second step of AdamW."""
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [x for entries in optimizer.state.values() for x in entries.values()]
    with Counting([*model.parameters(), *model.buffers(), *states]) as counting:
        step()
        counting.restart()
        step()
        return counting.peak
