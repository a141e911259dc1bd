"""Save a model, its optimizer and other state of a run: ``save(path, model=..., optimizer=...)``."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright_checkpoint._torch import unwrapped
from meshwright_checkpoint.errors import CheckpointError
from meshwright_checkpoint.format.safetensors_file import DTYPES, FileLayout, lay_out_file
from meshwright_checkpoint.plugin import DEFAULT
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.saving.background import Job, SaveHandle
from meshwright_checkpoint.saving.staging import StagingBuffer, tensor_bytes
from meshwright_checkpoint.shards.write_shares import Piece, TensorLayout, plan_writes
from meshwright_checkpoint.state import collect, rng
from meshwright_checkpoint.state.optimizer_set import AnyOptimizer, OptimizerSet, as_one, own_state
from meshwright_checkpoint.storage.backend import CheckpointStorage, ForeignStorage, any_storage_of
from meshwright_checkpoint.storage.checkpoint_list import step_of
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.boxes import Box
from meshwright_dtensor.utils.names import listing

MAX_PLANS = 4


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra: Any = None,
    asynchronous: bool = True,
    step: int | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    backend: str = DEFAULT,
) -> SaveHandle:
    """Save a checkpoint (a collective call). It appears at `path` as a whole or not at all.

    Args:
        path: a directory that does not exist yet, such as "run/step-100", or a URL of fsspec; every rank sees it.
        model: a module of plain tensors and DTensors. A plain tensor must be equal on all ranks that have it.
        optimizer: over parameters of `model`; its states are stored by parameter name. Or a list of optimizers, each over
            parameters of its own.
        extra: numbers, text, lists, tuples, dicts and plain tensors, such as the state_dict() of a scheduler, a grad scaler
            or a data loader. The value of rank 0 is saved.
        asynchronous: return after copying the values; a thread writes them. The next `save` waits for the thread, and
            raises its error.
        step: number of the training step; by default the number at the end of `path`, if any.
        keep_last: after the commit, keep only so many checkpoints with the highest steps in the parent directory.
        keep_every: also keep checkpoints whose step is a multiple of this.
        backend: name of a checkpoint backend; `meshwright plugins` lists them. Backends with another format ("dcp") save
            synchronously, store no random streams, and reject `step` and `keep_last`.

    Returns:
        A handle; `handle.wait()` returns once the checkpoint is committed, and raises if the save failed.

    Raises:
        CheckpointError: the path exists, another job saves there, or an earlier asynchronous save failed.
        UnsupportedError, UsageError: something in the state cannot be saved; the message has its name.
    """
    return save_and_keep(
        path,
        Retention(keep_last, keep_every),
        model=model,
        optimizer=optimizer,
        extra=extra,
        asynchronous=asynchronous,
        step=step,
        backend=backend,
    )


def save_and_keep(
    path: str | os.PathLike[str],
    retention: Retention,
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    extra: Any,
    asynchronous: bool = True,
    step: int | None = None,
    backend: str = DEFAULT,
) -> SaveHandle:
    """`save`. retention: which other checkpoints stay."""
    optimizers = as_one(optimizer)
    collect.check_call("save", model)
    if step is not None and (type(step) is not int or step < 0):
        raise UsageError(f"step={step!r} is not a training step; pass an int of at least 0")
    storage = any_storage_of(path, backend)
    if isinstance(storage, ForeignStorage):
        if isinstance(optimizers, OptimizerSet):
            raise UsageError(
                f"backend {backend!r} stores one optimizer, and optimizer= is a list; leave out backend="
            )
        if retention != Retention():
            text = f"backend {backend!r} removes no older checkpoints; leave out keep_last and keep_every"
            raise UsageError(text)
        if step is not None:
            text = f"backend {backend!r} stores no step; leave out step={step}, or save it in extra"
            raise UsageError(text)
        ranks = Ranks()
        _check_arguments(ranks.run_checked(lambda: _arguments(storage, model, optimizers, extra)), ranks)
        with own_state(unwrapped(model), optimizers):
            storage.write(model, optimizers, extra, ranks)
        return SaveHandle(storage.where, None)
    if step is None:
        step = step_of(storage.name)
    with own_state(unwrapped(model), optimizers):
        handle = _saver().save(storage, model, optimizers, extra, step, retention, asynchronous)
    if not asynchronous:
        handle.wait()
    return handle


def prepare_save(
    model: nn.Module, *, optimizer: Optimizer | Sequence[Optimizer] | None = None, wait: bool = False
) -> None:
    """Allocate the host buffer of asynchronous saves now, in the background (a collective call).

    Without it the first save allocates the buffer page by page while training waits, which takes several times as long as
    later saves. Call it after the first step, when the optimizer has its states. The buffer has the size of this rank's
    share of all tensors, and is pinned if they are on a GPU.

    Args:
        model, optimizer: as for `save`.
        wait: return after the allocation, not at once.

    Raises:
        CheckpointError: an earlier asynchronous save failed.
        UnsupportedError, UsageError: something in the state cannot be saved; the message has its name.
    """
    collect.check_call("prepare_save", model)
    optimizers = as_one(optimizer)
    with own_state(unwrapped(model), optimizers):
        _saver().prepare(model, optimizers)
    if wait:
        _saver().buffer.prepared()


class WritePlans:
    """The write plans of the last layouts: which rank writes what."""

    def __init__(self) -> None:
        # pieces that this rank writes, and on rank 0 the shape and dtype of each tensor
        self._plans: OrderedDict[str, tuple[list[Piece], dict[str, Any]]] = OrderedDict()

    def collect(
        self, model: nn.Module, optimizer: Any, extra: Any, ranks: Ranks, shared: set[str], save_id: str
    ) -> tuple[collect.CollectedState, dict[str, Any], FileLayout]:
        """State and file of this rank, and on rank 0 shape and dtype of each tensor (a collective call).

        The write plan is computed again only if a layout has changed, by rank 0 for all.
        """
        collected, catalog = collect.CollectedState(), {}

        def catalog_digest() -> str:
            nonlocal collected, catalog
            collected = collect.collect(model, optimizer, extra, ranks, shared)
            catalog = collect.describe_shards(collected.shards)
            return hashlib.sha256(json.dumps(catalog).encode()).hexdigest()

        key = ranks.digest(ranks.run_checked(catalog_digest))
        # a rank may have made it in another world, or have made others since
        if ranks.most([key not in self._plans]) != [0]:
            catalogs = ranks.to_first(catalog)
            types, write_plan = ranks.run_checked(lambda: _plan_for_all(catalogs))
            pieces = ranks.from_first(write_plan)
            while len(self._plans) >= MAX_PLANS:
                self._plans.popitem(last=False)
            self._plans[key] = [Piece(name, tuple(map(tuple, box))) for name, box in pieces], types
        pieces, types = self._plans[key]
        metadata = {"format": "pt", "checkpoint": save_id, "file": str(ranks.rank)}
        shapes = {key: (part.shape, part.dtype) for key, part in collected.shards.items()}
        return collected, types, lay_out_file(pieces, shapes, metadata)


class Saver:
    """State that saves share: write plans, the host buffer, and the running save."""

    def __init__(self) -> None:
        self._plans = WritePlans()
        self.buffer = StagingBuffer()
        self._in_flight: SaveHandle | None = None

    def save(
        self,
        storage: CheckpointStorage,
        model: nn.Module,
        optimizer: AnyOptimizer,
        extra: Any,
        step: int | None,
        retention: Retention,
        asynchronous: bool = True,
    ) -> SaveHandle:
        """Copy the values if needed, start to write, and return the handle. See `save`."""
        ranks = Ranks()

        def local_arguments() -> dict[str, Any]:
            self._finish_previous()
            return _arguments(storage, model, optimizer, extra)

        _check_arguments(ranks.run_checked(local_arguments), ranks)
        save_id = ranks.first(uuid.uuid4().hex)
        shared = rng.shared(rng.digests(), ranks)
        collected, types, body = self._plans.collect(model, optimizer, extra, ranks, shared, save_id)
        about = collected.metadata
        job = Job(storage, save_id, ranks.rank, ranks.size, step, retention, about, types, body, asynchronous)

        @waiting_for_storage()
        def snapshot() -> None:
            storage.claim(save_id, ranks.rank)
            copied = any(not on_host(part.local.device) for part in collected.shards.values())
            bytes_of = self.buffer.take if asynchronous or copied else tensor_bytes
            job.data = bytes_of(body, collected.shards)

        ranks.run_on_first(waiting_for_storage()(lambda: storage.begin(save_id)))
        try:
            ranks.run_checked(snapshot)
        except BaseException:
            storage.end()
            if ranks.rank == 0:
                storage.finish()
            raise
        self._in_flight = SaveHandle(storage.where, job)
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

    def prepare(self, model: nn.Module, optimizer: AnyOptimizer) -> None:
        """See `prepare_save`."""
        ranks = Ranks()

        ranks.run_checked(self._finish_previous)
        shared = rng.shared(rng.digests(), ranks)
        collected, _, body = self._plans.collect(model, optimizer, None, ranks, shared, uuid.uuid4().hex)
        self.buffer.prepare(body.nbytes, collected.shards)


def _arguments(
    storage: CheckpointStorage | ForeignStorage, model: nn.Module, optimizer: Any, extra: Any
) -> dict[str, Any]:
    """Arguments of `save` that ranks compare."""
    stepped = collect.optimizer_given(model, optimizer)
    return {"path": storage.where, "optimizer": stepped, "extra": extra is not None}


def _check_arguments(here: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise UsageError, on every rank, if ranks call `save` with different arguments (a collective call)."""
    alike = ranks.same(here["path"])
    extra_on_first = ranks.first(here["extra"])
    flags = (bool(here["optimizer"]), here["optimizer"] is False, here["extra"] and not extra_on_first)
    given, missing, only_here = ranks.most(flags)
    if not alike or (given and missing) or only_here:
        _refuse_arguments(ranks.gather(here))


def _refuse_arguments(gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError for arguments of all ranks that differ."""
    paths = sorted({arguments["path"] for arguments in gathered})
    if len(paths) > 1:
        text = f"ranks save to different paths ({', '.join(paths)}); pass the same path on every rank"
        raise UsageError(text)
    with_optimizer = [rank for rank, arguments in enumerate(gathered) if arguments["optimizer"]]
    if with_optimizer and any(arguments["optimizer"] is False for arguments in gathered):
        raise UsageError(
            f"optimizer is given on ranks {listing(map(str, with_optimizer), 8)} of {len(gathered)} only; "
            "pass it on all ranks, or on none"
        )
    with_extra = [rank for rank, arguments in enumerate(gathered) if arguments["extra"]]
    if with_extra and with_extra[0]:
        raise UsageError(
            f"extra is given on rank {with_extra[0]} and not on rank 0, whose value is saved; pass it on rank 0 too"
        )


@cache
def _saver() -> Saver:
    """The Saver of this process."""
    return Saver()


def _plan_for_all(catalogs: list[dict[str, Any]] | None) -> tuple[dict[str, Any], list[Any] | None]:
    """key -> (shape, dtype), and the pieces of each rank as JSON; nothing for None. Raises as `plan_writes`."""
    if catalogs is None:
        return {}, None
    types, tensors = _merge_catalogs(catalogs)
    return types, [[(p.key, p.box) for p in pieces] for pieces in plan_writes(tensors, len(catalogs))]


def _merge_catalogs(catalogs: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, TensorLayout]]:
    """key -> (shape, dtype), and key -> boxes of all ranks. Raises UsageError if shapes or dtypes differ between ranks."""
    types: dict[str, tuple[list[int], str]] = {}
    boxes: dict[str, list[tuple[Box, ...]]] = {}
    for rank, catalog in enumerate(catalogs):
        for key, (shape, dtype, rank_boxes) in catalog.items():
            first = types.setdefault(key, (shape, dtype))
            if first != (shape, dtype):
                raise UsageError(
                    f"{key} has shape {shape} and dtype {dtype} on rank {rank}, and {first[0]} and {first[1]} on another; "
                    "save one tensor that is equal on all ranks, or a DTensor"
                )
            boxes.setdefault(key, [()] * len(catalogs))[rank] = tuple(
                tuple((start, length) for start, length in box) for box in rank_boxes
            )
    tensors = {
        key: TensorLayout(tuple(shape), DTYPES[dtype].itemsize, tuple(boxes[key]))
        for key, (shape, dtype) in types.items()
    }
    return types, tensors
