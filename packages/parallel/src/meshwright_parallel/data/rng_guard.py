"""Refuse datasets that draw random numbers when they are read by row.

Each rank reads other rows, so a random crop would depend on the rank, and the random state of the main process (dropout masks)
would differ between ranks. So the states of the generators are compared around every read.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.errors import UnsupportedError
from meshwright_parallel.data.same_rows import RowsAndText, SharedRow, row_text


class WatchedDataset(Dataset[Any]):
    """A map-style dataset that raises if reading rows draws random numbers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # not there yet: unpickling in a worker asks before __init__
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: Sequence[Any]) -> RowsAndText:
        """The rows, and what all ranks compare where the last index asks for it."""
        before, text = _generators(), ""
        shared = indices[-1] if indices and isinstance(indices[-1], SharedRow) else None
        rows = self._rows(indices[:-1] if shared is not None else indices)
        if shared is not None:
            here = shared.position is not None and isinstance(rows, list)
            text = row_text(rows[shared.position] if here else self._rows([shared.index])[0])
        _check(before, f"dataset {type(self.dataset).__name__}")
        return RowsAndText(rows, text)

    @waiting_for_storage()
    def _rows(self, indices: Sequence[Any]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if callable(many) else [self.dataset[index] for index in indices]


class WatchedCollate:
    """A collate function that raises if it draws random numbers."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, read: Any) -> tuple[str, Any]:
        """The text of the shared row, and the batch. `read`: from `WatchedDataset`."""
        before = _generators()
        batch = self.collate(read.rows)
        _check(before, "collate_fn")
        return read.text, batch


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    drawn = None
    if numpy is not None:
        state = numpy.random.get_state()
        drawn = (bytes(state[1]), *state[2:])
    return torch.get_rng_state(), random.getstate(), drawn


def _check(before: tuple[Any, ...], who: str) -> None:
    after = _generators()
    same = torch.equal(before[0], after[0]), before[1] == after[1], before[2] is None or before[2] == after[2]
    if all(same):
        return
    name = ("torch", "random", "numpy")[same.index(False)]
    raise UnsupportedError(
        f"{who} draws from the default generator of {name}, so its rows would differ from those of one device; "
        "give it a generator of its own that depends on the row, or loop over the plain loader"
    )
