"""Batches of which each data rank has read rows of its own: `shard_loader(loader, rows="local")`.

The global batch is the rows of data rank 0, then those of data rank 1, and so on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from meshwright_dtensor.api import from_local
from meshwright_dtensor.devices import HOST, device_of
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.model.batch_size import BatchSize, call_arguments
from meshwright_dtensor.model.batch_text import describe
from meshwright_dtensor.sharding.boxes import chunk_box
from meshwright_dtensor.sharding.states import States
from meshwright_parallel._torch.core import map_tensors
from meshwright_parallel.placement.inputs import ModelPlacement, size_of

_ENDED, _FAILED = -1, -2


@dataclass(frozen=True)
class _Header:
    """What a rank tells the others about its next batch; `rows` is _ENDED or _FAILED where it has none."""

    rows: int
    # of names, dtypes and all sizes but the number of rows
    form: int = 0
    values: int = 0


class LocalRows:
    """Global batches from loaders that give each data rank rows of its own.

    A loader that ends early, or with a smaller batch, leaves the others to fill the batch: it is then put together on
    every rank, and divided as any batch.
    """

    def __init__(self, loader: Iterable[Any], placed: ModelPlacement) -> None:
        self.loader, self.placed = loader, placed
        mesh = placed.mesh
        count = prod(mesh.shape)
        self.axes = self._dividing(placed.input_states("rows", (count,), BatchSize(count)))
        self.data_ranks = prod(mesh.size(axis) for axis in self.axes)
        self.data_rank = 0
        for axis in self.axes:
            self.data_rank = self.data_rank * mesh.size(axis) + mesh.get_local_rank(axis)
        self.device = device_of(mesh.device_type).current()

    def _dividing(self, states: States) -> list[int]:
        """The axes of the mesh that divide rows, outermost first."""
        return [axis for axis, state in enumerate(states) if state == 0 and self.placed.mesh.size(axis) > 1]

    def __iter__(self) -> Iterator[Any]:
        # rank of the run -> its data rank
        peers = [values[0] for values in self._gathered([self.data_rank])]
        batches = iter(self.loader)
        while True:
            batch, failure = None, None
            try:
                batch = next(batches, None)
                header = self._header(batch)
            except Exception as error:
                # of any kind: the other ranks wait for this one's header
                header, failure = _Header(_FAILED), error
            headers = [_Header(*values) for values in self._gathered(astuple(header))]
            if failure is not None:
                raise failure
            failed = [rank for rank, header in enumerate(headers) if header.rows == _FAILED]
            if failed:
                raise UsageError(f"the loader of rank {failed[0]} has failed; the error is on that rank")
            if all(header.rows == _ENDED for header in headers):
                return
            rows = self._rows(headers, peers)
            yield self._stitched(batch, rows) if self._fits(rows) else self._exchanged(batch, rows, peers)

    def _header(self, batch: Any) -> _Header:
        if batch is None:
            return _Header(_ENDED)
        args, kwargs = call_arguments(batch)
        check_leaves(batch)
        rows = size_of(args, kwargs).rows
        if rows is None:
            raise UnsupportedError("a batch without a tensor of rows; give tensors whose dim 0 is the rows")

        def without_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != rows:
                raise UnsupportedError(
                    f"batch tensor {name!r} has shape {list(tensor.shape)} for {rows} rows of this data rank, so the global value "
                    "is not known; let collate_fn return tensors whose dim 0 is the rows"
                )
            return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=HOST)

        form = describe(*map_tensors(without_rows, args, kwargs))
        # compared within a data rank only
        values = describe(args, kwargs, values=self.data_ranks < dist.get_world_size())
        return _Header(rows, zlib.crc32(form.encode()), zlib.crc32(values.encode()))

    def _gathered(self, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank of the run."""
        here = torch.tensor(values, dtype=torch.int64, device=self.device)
        everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size())]
        with waiting():
            dist.all_gather(everywhere, here)
        gathered: list[list[int]] = torch.stack(everywhere).tolist()
        return gathered

    def _rows(self, headers: Sequence[_Header], peers: Sequence[int]) -> list[int]:
        """The number of rows of each data rank, which all of its ranks must have alike."""
        first = {data_rank: peers.index(data_rank) for data_rank in range(self.data_ranks)}
        for rank, header in enumerate(headers):
            other = first[peers[rank]]
            if header != headers[other]:
                raise UsageError(
                    f"ranks {other} and {rank} are both data rank {peers[rank]} of {self.data_ranks}, and their loaders give "
                    "different rows; divide the rows by data rank: DistributedSampler(dataset, "
                    f"num_replicas={self.data_ranks}, rank={peers[rank]}) on both"
                )
        leading = next(rank for rank, header in enumerate(headers) if header.rows >= 0)
        for rank, header in enumerate(headers):
            if header.rows >= 0 and header.form != headers[leading].form:
                raise UsageError(
                    f"the batches of ranks {leading} and {rank} differ in names, dtypes or sizes other than the number of rows; "
                    "pad to a length that does not depend on the rows"
                )
        return [max(0, headers[rank].rows) for rank in first.values()]

    def _fits(self, rows: Sequence[int]) -> bool:
        """Whether each data rank has read exactly its part of the global batch."""
        total, mesh = sum(rows), self.placed.mesh
        states = self.placed.input_states("rows", (total,), BatchSize(total))
        if self._dividing(states) != self.axes:
            return False
        for data_rank, count in enumerate(rows):
            place, left = [0] * mesh.ndim, data_rank
            for axis in reversed(self.axes):
                left, place[axis] = divmod(left, mesh.size(axis))
            if chunk_box((total,), tuple(mesh.shape), place, states)[0][1] != count:
                return False
        return True

    def _stitched(self, batch: Any, rows: Sequence[int]) -> Any:
        args, kwargs = call_arguments(batch)
        total, mesh = sum(rows), self.placed.mesh
        size = BatchSize(total, size_of(args, kwargs).tokens)
        by_row = self.placed.input_states("rows", (total,), BatchSize(total))

        def as_global(name: str, tensor: torch.Tensor) -> torch.Tensor:
            shape = (total, *tensor.shape[1:])
            part = from_local(tensor.to(self.device), mesh, by_row, shape)
            return part.redistribute(self.placed.input_states(name, shape, size))

        return joined(batch, *map_tensors(as_global, args, kwargs))

    def _exchanged(self, batch: Any, rows: Sequence[int], peers: Sequence[int]) -> Any:
        """The whole batch on every rank, divided as any other: the last ones of loaders that end unevenly."""
        leaves, structure = pytree.tree_flatten(batch)
        here = [leaf.to(HOST) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        everywhere: list[Any] = [None] * dist.get_world_size()
        with waiting():
            dist.all_gather_object(everywhere, (here, structure) if rows[self.data_rank] else None)
        parts = [everywhere[peers.index(data_rank)] for data_rank, count in enumerate(rows) if count]
        columns = zip(*(leaves for leaves, _ in parts), strict=True)
        whole = [torch.cat(c).to(self.device) if isinstance(c[0], torch.Tensor) else None for c in columns]
        batch = pytree.tree_unflatten(whole, parts[0][1])
        return joined(batch, *self.placed.place(*call_arguments(batch)))


def check_leaves(batch: Any) -> None:
    """Refuse values that are not tensors: those of the other ranks' rows would be missing."""
    for leaf in pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if not isinstance(leaf, torch.Tensor) and leaf is not None:
            raise UnsupportedError(
                f"the batch holds a {type(leaf).__name__} ({leaf!r:.40}), which describes this rank's rows only; "
                "let collate_fn return tensors, or loop over the plain loader"
            )


def joined(batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments in a container like `batch`; mappings of other classes become dicts."""
    if isinstance(batch, Mapping):
        return kwargs
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*args)
    return list(args) if isinstance(batch, list) else args if isinstance(batch, tuple) else args[0]
