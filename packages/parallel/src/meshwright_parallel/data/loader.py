"""Load only the rows that a rank computes with; the batch is still one global value.

for batch in shard_loader(loader):       # the loop of one device
    loss = model(**batch).loss
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from meshwright_dtensor.api import from_local
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.model.batch_size import BatchSize, call_arguments
from meshwright_dtensor.model.batch_text import describe, difference, is_compared
from meshwright_dtensor.sharding.boxes import chunk_box
from meshwright_dtensor.sharding.states import States
from meshwright_parallel._torch.core import map_tensors
from meshwright_parallel.data.local_rows import LocalRows, check_leaves, joined
from meshwright_parallel.data.rng_guard import WatchedCollate, WatchedDataset
from meshwright_parallel.data.same_rows import PartRead, SharedRow, check_same_rows, length_of
from meshwright_parallel.placement.inputs import ModelPlacement, only_live_placement, placement_of, size_of
from meshwright_parallel.ranks import differing, first_other


def shard_loader(
    loader: Iterable[Any], *, rows: Literal["global", "local"] = "global", model: nn.Module | None = None
) -> ShardedLoader:
    """An iterable of the same batches, as global tensors of which this rank holds its rows.

    A `torch.utils.data.DataLoader` over a map-style dataset reads only this rank's rows: the loader's own sampler
    decides the order on every rank alike, and each rank fetches and collates its part. Any other iterable of batches
    is read whole on every rank and cut. A batch that does not divide is whole on every rank.

    Args:
        loader: a DataLoader or any iterable of batches (dicts, tuples, lists or tensors), the same on every rank.
        rows: "local": the loader of each data rank gives rows of its own (a DistributedSampler, files by rank), and the
            global batch is those of data rank 0, then those of data rank 1, and so on. Ranks that share a data rank
            (tensor and pipeline parallelism) must have the same rows. Loaders may end unevenly.
        model: the parallel model that the batches are for; needed only where models with different meshes are alive.
            Without it the mesh is looked up when a loop begins, so the loader may be made before the model is.

    Raises:
        UsageError: a loader of global rows has a DistributedSampler, or `model` is not parallel. While iterating: no
            model is parallel, or ranks have other data, or another order of its rows.
        UnsupportedError: while iterating: the dataset draws random numbers, or a collated batch does not consist of rows.
    """
    if rows not in ("global", "local"):
        raise UsageError(f'rows={rows!r} of shard_loader; give "global" or "local"')
    if rows == "global" and isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, which divides the data already; leave the sampler out, or say that each data "
            'rank reads rows of its own: shard_loader(loader, rows="local")'
        )
    placed = None
    if model is not None:
        placed = placement_of(model)
        if placed is None:
            raise UsageError(f"this {type(model).__name__} is not parallel; call parallelize() first")
    return ShardedLoader(loader, placed, rows)


class ShardedLoader:
    """The result of `shard_loader`. It has the attributes of the wrapped loader (`dataset`, `sampler`, ...)."""

    def __init__(self, loader: Iterable[Any], placed: ModelPlacement | None, rows: str = "global") -> None:
        self.loader = loader
        self._placed = placed
        self._rows = rows
        self._local: _LocalLoader | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # copying and unpickling read it before __init__
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        placed = self._placed or only_live_placement()
        if self._rows == "local":
            return iter(LocalRows(self.loader, placed))
        if not _reads_rows(self.loader):
            return _cut(self.loader, placed)
        if self._local is None or self._local.placed is not placed:
            self._local = _LocalLoader(self.loader, placed)
        return iter(self._local)


def _reads_rows(loader: Iterable[Any]) -> bool:
    """Whether rows can be read one by one: a stock DataLoader that batches a map-style dataset, in order."""
    if type(loader) is not DataLoader or loader.batch_sampler is None:
        return False
    return not isinstance(loader.dataset, IterableDataset) and getattr(loader, "in_order", True)


def _cut(loader: Iterable[Any], placed: ModelPlacement) -> Iterator[Any]:
    for batch in loader:
        args, kwargs = call_arguments(batch)
        text = describe(args, kwargs, values=True)
        if differing([zlib.crc32(text.encode())]):
            rank, first, other = first_other(text)
            raise UsageError(difference(f"rank {rank}", first, other))
        yield joined(batch, *placed.place(args, kwargs))


class _LocalLoader:
    """A DataLoader that fetches this rank's rows of every batch."""

    def __init__(self, loader: Any, placed: ModelPlacement) -> None:
        self.placed = placed
        # of each batch that is being loaded: its indices, and whether ranks compare what they read
        self.pending: deque[tuple[list[Any], bool]] = deque()
        self._dataset_rows = length_of(loader.dataset)
        same = "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator persistent_workers"
        options: dict[str, Any] = {name: getattr(loader, name) for name in same.split()}
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        rows, collate = _RankRows(loader.batch_sampler, self), WatchedCollate(loader.collate_fn)
        dataset = WatchedDataset(loader.dataset)
        self._loader = DataLoader[Any](dataset, batch_sampler=rows, collate_fn=collate, **options)

    def states(self, name: str, shape: tuple[int, ...], rows: int, tokens: int | None = None) -> States:
        return self.placed.input_states(name, shape, BatchSize(rows, tokens))

    def rows(self, count: int) -> tuple[int, int]:
        """(offset, length) of this rank's rows in a batch of `count`."""
        mesh = self.placed.mesh
        here = [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
        return chunk_box((count,), tuple(mesh.shape), here, self.states("rows", (count,), count))[0]

    def __iter__(self) -> Iterator[Any]:
        self.pending.clear()
        for shared, batch in self._loader:
            yield self._global_batch(batch, *self.pending.popleft(), shared)

    def _global_batch(self, batch: Any, indices: list[Any], compared: bool, shared: str) -> Any:
        """The global batch of the rows `indices`, of which `batch` is this rank's part. `shared`: see `PartRead`."""
        count = len(indices)
        offset, length = self.rows(count)
        by_row = self.states("rows", (count,), count)
        mesh = self.placed.mesh
        descriptions: list[str] = []
        args, kwargs = call_arguments(batch)
        tokens = size_of(args, kwargs).tokens

        def check(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if length != count and (tensor.dim() == 0 or tensor.shape[0] != length):
                raise UnsupportedError(
                    f"batch tensor {name!r} has shape {tuple(tensor.shape)} for {length} rows, so it cannot be put together "
                    "from the rows of each rank; let collate_fn return tensors whose dim 0 is the rows, or loop over the "
                    "plain loader"
                )
            descriptions.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
            return tensor

        def as_global(name: str, tensor: torch.Tensor) -> torch.Tensor:
            shape = (count, *tensor.shape[1:]) if tensor.dim() and length != count else tuple(tensor.shape)
            whole = tensor.dim() == 0 or length == count
            placed = from_local(tensor, mesh, ("I",) * mesh.ndim if whole else by_row, shape)
            return placed.redistribute(self.states(name, shape, count, tokens))

        map_tensors(check, args, kwargs)
        if length != count:
            check_leaves(batch)
        content = describe(args, kwargs, values=True) if compared else ""
        read = PartRead(indices, offset, "; ".join(descriptions), self._dataset_rows, shared, content)
        check_same_rows(
            read, mesh, [axis for axis, state in enumerate(by_row) if state != 0 and mesh.size(axis) > 1]
        )
        return joined(batch, *map_tensors(as_global, args, kwargs))


class _RankRows:
    """A batch sampler that yields this rank's rows of each batch."""

    def __init__(self, batches: Iterable[list[Any]], owner: _LocalLoader) -> None:
        self.batches, self.owner, self.count = batches, owner, 0

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.batches:
            indices, compared = list(batch), is_compared(self.count)
            self.count += 1
            self.owner.pending.append((indices, compared))
            offset, length = self.owner.rows(len(indices))
            part = indices[offset : offset + length]
            if compared and length != len(indices):
                part.append(SharedRow(indices[0], None if offset else 0))
            yield part

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]
