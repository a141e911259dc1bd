"""Save a model, its optimizer and whatever else a run needs to go on: ``save(path, model=..., optimizer=...)``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.dtypes import dtype_name
from meshwright_checkpoint.format.safetensors_file import FileLayout, lay_out_file
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.saving.background import Job, SaveHandle
from meshwright_checkpoint.saving.staging import StagingBuffer, tensor_bytes
from meshwright_checkpoint.shards.write_shares import Piece, TensorLayout, plan_writes
from meshwright_checkpoint.state import rng
from meshwright_checkpoint.state.collect import CollectedState, check_model, collect, optimizer_given
from meshwright_checkpoint.storage.backend import CheckpointStorage, ForeignStorage, any_storage_of
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.names import listing

MAX_PLANS = 4


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    asynchronous: bool = True,
    step: int | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    backend: str = DEFAULT,
) -> SaveHandle:
    """Save a checkpoint (a collective call). It appears at `path` whole, or not at all.

    Args:
        path: a directory that does not exist yet, such as "run/step-100", or a URL of fsspec; every rank sees it.
        model: any module of plain tensors and DTensors; a plain tensor counts as equal on all ranks that have it.
        optimizer: over parameters of `model`; its states are stored by parameter name.
        extra: numbers, text, lists, tuples, dicts and plain tensors, such as the state_dict() of a scheduler, a grad scaler
            or a data loader. Rank 0's is saved.
        asynchronous: return once the values are copied; a thread writes them. The next `save` waits for it, and raises what
            it failed with.
        step: number of the training step; by default the number that `path` ends in, if any.
        keep_last: after this one is safe, remove all but the last so many checkpoints (by step) beside it.
        keep_every: ... except those whose step is a multiple of this.
        backend: name of a checkpoint backend; `meshwright plugins` lists them. Those with a format of others ("dcp") write
            before they return, store no random streams, and refuse `step` and `keep_last`.

    Returns:
        A handle; `handle.wait()` returns once the checkpoint is committed, and raises if it failed.

    Raises:
        CheckpointError: the path is taken, another job saves there, or an earlier asynchronous save failed.
        UnsupportedError, UsageError: something in the state cannot be saved; the message has its name.
    """
    retention = Retention.of(keep_last, keep_every)
    check_model("save", model)
    if step is not None and (type(step) is not int or step < 0):
        raise UsageError(f"step={step!r} is no number of a training step; give an int, 0 or more")
    storage = any_storage_of(path, backend)
    if isinstance(storage, ForeignStorage):
        if keep_last is not None or keep_every is not None:
            raise UsageError(
                f"backend {backend!r} removes no older checkpoints; leave out keep_last and keep_every"
            )
        if step is not None:
            raise UsageError(
                f"backend {backend!r} stores no step; leave out step={step}, or put it into extra"
            )
        ranks = Ranks()
        _check_alike(ranks.gather_checked(lambda: _given(storage, model, optimizer, extra)))
        storage.write(model, optimizer, extra, ranks)
        return SaveHandle.finished(storage.where)
    if step is None:
        match = re.search(r"(\d{1,18})$", storage.name)
        step = int(match[1]) if match else None
    handle = _saver().save(storage, model, optimizer, extra, step, retention, asynchronous)
    if not asynchronous:
        handle.wait()
    return handle


def prepare_save(
    model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None, wait: bool = False
) -> None:
    """Find the memory of asynchronous saves now, in the background (a collective call).

    Without it the first save finds it, page by page, while training waits: several times as long as the next ones take. Call it
    when the optimizer has its states, after the first step. It takes what the first save would take: this rank's share of
    all tensors, once, pinned where they lie on a GPU.

    Args:
        model, optimizer: what will be saved, as for `save`.
        wait: return when the memory is there, not at once.

    Raises:
        CheckpointError: an earlier asynchronous save failed.
        UnsupportedError, UsageError: something in the state cannot be saved; the message has its name.
    """
    _saver().prepare(model, optimizer)
    if wait:
        _saver().prepared()


class Saver:
    """What is kept between saves: the plan of who writes what, the buffer of the snapshot, and the save in flight."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, tuple[list[list[Piece]], dict[str, Any]]] = OrderedDict()
        self._snapshots = StagingBuffer()
        self._in_flight: SaveHandle | None = None

    def save(
        self,
        storage: CheckpointStorage,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Any,
        step: int | None,
        retention: Retention,
        asynchronous: bool = True,
    ) -> SaveHandle:
        """Copy (where values may change before they are written), start writing, return the handle. See `save`."""
        ranks = Ranks()

        def local_arguments() -> dict[str, Any]:
            self._finish_previous()
            arguments = _given(storage, model, optimizer, extra)
            return {**arguments, "rng": rng.digests(), "id": uuid.uuid4().hex}

        gathered = ranks.gather_checked(local_arguments)
        _check_alike(gathered)
        save_id = gathered[0]["id"]
        collected, write_plan, tensor_types = self._collect_and_plan(
            ranks, model, optimizer, extra, rng.shared([arguments["rng"] for arguments in gathered])
        )
        job = Job(storage, save_id, ranks.rank, ranks.size, step, retention, background=asynchronous)

        def begin() -> None:
            if ranks.rank == 0:
                storage.begin(save_id)

        def snapshot() -> None:
            storage.claim(save_id, ranks.rank)
            job.body = _file_of(ranks.rank, write_plan, collected, save_id)
            on_gpu = any(part.local.is_cuda for part in collected.shards.values())
            if asynchronous or on_gpu:
                job.data = self._snapshots.take(job.body, collected.shards)
            else:
                job.data = tensor_bytes(job.body, collected.shards)

        ranks.run_checked(begin)
        try:
            ranks.run_checked(snapshot)
        except BaseException:
            storage.end()
            if ranks.rank == 0:
                storage.finish()
            raise
        job.metadata, job.tensor_types = collected.metadata, tensor_types
        self._in_flight = SaveHandle(job)
        return self._in_flight

    def _finish_previous(self) -> None:
        previous, self._in_flight = self._in_flight, None
        if previous is not None and not previous.error_raised:
            try:
                previous.wait()
            except CheckpointError as error:
                raise CheckpointError(
                    f"the save before this one failed, and this one was not begun (call it again): {error}"
                ) from error

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `prepare_save`."""
        ranks = Ranks()

        def digests() -> Any:
            self._finish_previous()
            return rng.digests()

        shared = rng.shared(ranks.gather_checked(digests))
        collected, write_plan, _ = self._collect_and_plan(ranks, model, optimizer, None, shared)
        body = _file_of(ranks.rank, write_plan, collected, uuid.uuid4().hex)
        self._snapshots.prepare(body.nbytes, collected.shards)

    def prepared(self) -> None:
        """Return once the memory that `prepare` asked for is there."""
        self._snapshots.prepared()

    def _collect_and_plan(
        self,
        ranks: Ranks,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Any,
        shared: set[str],
    ) -> tuple[CollectedState, list[list[Piece]], dict[str, Any]]:
        """What there is on this rank, who writes what, and shape and dtype of every tensor.

        The plan is worked out anew only when a layout has changed.
        """
        collected, catalog = CollectedState(), []

        def catalog_digest() -> str:
            nonlocal collected, catalog
            collected = collect(model, optimizer, extra, ranks.rank, ranks.size, shared)
            catalog = _catalog(collected)
            return hashlib.sha256(json.dumps(catalog).encode()).hexdigest()

        key = hashlib.sha256("".join(ranks.gather_checked(catalog_digest)).encode()).hexdigest()
        if key not in self._plans:
            catalogs = ranks.gather(catalog)
            tensor_types, tensors = ranks.run_checked(lambda: _merged(catalogs))
            write_plan = ranks.run_checked(lambda: plan_writes(tensors, ranks.size))
            while len(self._plans) >= MAX_PLANS:
                self._plans.popitem(last=False)
            self._plans[key] = write_plan, tensor_types
        return collected, *self._plans[key]


def _given(
    storage: CheckpointStorage | ForeignStorage, model: nn.Module, optimizer: Any, extra: Any
) -> dict[str, Any]:
    """What a rank tells the others of what it was asked to save."""
    return {"path": storage.where, "optimizer": optimizer_given(model, optimizer), "extra": extra is not None}


def _check_alike(gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError, on every rank, where ranks do not save the same thing: part of it would be lost, or waited for."""
    paths = sorted({arguments["path"] for arguments in gathered})
    if len(paths) > 1:
        raise UsageError(f"ranks save to different paths ({', '.join(paths)}); give every rank the same")
    with_optimizer = [rank for rank, arguments in enumerate(gathered) if arguments["optimizer"]]
    if with_optimizer and any(arguments["optimizer"] is False for arguments in gathered):
        raise UsageError(
            f"optimizer is given on ranks {listing(map(str, with_optimizer), 8)} of {len(gathered)} only; "
            "give every rank its own, or none"
        )
    with_extra = [rank for rank, arguments in enumerate(gathered) if arguments["extra"]]
    if with_extra and with_extra[0]:
        raise UsageError(
            f"extra is given on rank {with_extra[0]} and not on rank 0, whose is saved; give it there too"
        )


@cache
def _saver() -> Saver:
    """The saver of this process."""
    return Saver()


def _file_of(rank: int, write_plan: list[list[Piece]], collected: CollectedState, save_id: str) -> FileLayout:
    metadata = {"format": "pt", "checkpoint": save_id, "file": str(rank)}
    shapes = {key: (part.shape, part.dtype) for key, part in collected.shards.items()}
    return lay_out_file(write_plan[rank], shapes, metadata)


def _catalog(collected: CollectedState) -> list[Any]:
    return [
        [
            key,
            list(part.shape),
            dtype_name(part.dtype, key),
            part.dtype.itemsize,
            [there for there, _ in part.boxes],
        ]
        for key, part in collected.shards.items()
    ]


def _merged(catalogs: list[list[Any]]) -> tuple[dict[str, Any], dict[str, TensorLayout]]:
    """key -> (shape, dtype), and what all ranks hold. Raises UsageError where ranks contradict each other."""
    types: dict[str, tuple[list[int], str, int]] = {}
    boxes: dict[str, dict[int, Any]] = {}
    for rank, rows in enumerate(catalogs):
        for key, shape, dtype, itemsize, held in rows:
            first = types.setdefault(key, (shape, dtype, itemsize))
            if first != (shape, dtype, itemsize):
                raise UsageError(
                    f"{key} has shape {shape} and dtype {dtype} on rank {rank}, and {first[0]} and {first[1]} on another; it "
                    "must be one tensor, the same on all ranks or a DTensor"
                )
            boxes.setdefault(key, {})[rank] = tuple(tuple(map(tuple, box)) for box in held)
    tensors = {
        key: TensorLayout(tuple(shape), itemsize, tuple(boxes[key].get(r, ()) for r in range(len(catalogs))))
        for key, (shape, _, itemsize) in types.items()
    }
    return {key: (shape, dtype) for key, (shape, dtype, _) in types.items()}, tensors
