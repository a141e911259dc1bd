"""Offline reshard: rewrite a checkpoint for other ranks or another plan, in one process and little memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from itertools import chain, product

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.convert.verify import read_rows
from meshwright_checkpoint.format.checksum import BLOCK, block_sums
from meshwright_checkpoint.format.safetensors_file import FileLayout, dtype_name, lay_out_file
from meshwright_checkpoint.saving.background import describe_file, file_name, manifest_of
from meshwright_checkpoint.shards.write_shares import TensorLayout, plan_writes
from meshwright_checkpoint.state.collect import MODEL, OPTIMIZER
from meshwright_checkpoint.storage.backend import CheckpointStorage, WriteFile, complete_file
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.sharding.boxes import Box, box_numel, region_boxes, region_of, whole_box
from meshwright_dtensor.strategy.resolve import parameter_states, resolve_strategies
from meshwright_dtensor.utils.names import did_you_mean, listing

Progress = Callable[[int], None]


def rewrite(
    checkpoint: Checkpoint,
    storage: CheckpointStorage,
    ranks: int,
    plan: ParallelPlan | None = None,
    progress: Progress = lambda nbytes: None,
) -> None:
    """Write the same state to `storage` in `ranks` files, as a save by so many ranks would.

    Args:
        plan: the layout of those ranks. Each rank then finds its shards in one file. The layout follows the plan's strategies
            (with ZeRO shards), or the plan's rules if strategies are not installed. Pipeline stages are not distinguished:
            their ranks share each tensor evenly. The plan is stored in the checkpoint. Without a plan the bytes are divided
            evenly.
        progress: called with the number of bytes after each write.

    Raises:
        CheckpointError: the path exists.
        CorruptError: the checkpoint is damaged.
        PlanError: a rule of the plan matches no parameter of the checkpoint, or the plan is invalid.
        PluginError: a strategy that the plan names is not installed, but another for its axis is.
    """
    held = {} if plan is None else _plan_boxes(checkpoint, plan)
    tensors = {}
    for key, source in checkpoint.tensors.items():
        whole = (whole_box(source.shape),) if 0 not in source.shape else ()
        tensors[key] = TensorLayout(source.shape, source.dtype.itemsize, held.get(key) or (whole,) * ranks)
    shapes = {key: (source.shape, source.dtype) for key, source in checkpoint.tensors.items()}
    save_id = uuid.uuid4().hex
    notes = []
    storage.begin(save_id)
    try:
        storage.claim(save_id, 0)
        for rank, pieces in enumerate(plan_writes(tensors, ranks)):
            body = lay_out_file(pieces, shapes, {"format": "pt", "checkpoint": save_id, "file": str(rank)})
            sums = _write(checkpoint, storage.writer(file_name(rank)), body, progress)
            notes.append(describe_file(rank, body, sums))
        about = checkpoint.manifest.model_dump(mode="json")
        about.update(sha256="", id=save_id, world_size=ranks)
        if plan is not None:
            about["plan"] = json.loads(plan.to_json())
        types = {key: (shape, dtype_name(dtype, key)) for key, (shape, dtype) in shapes.items()}
        storage.commit(manifest_of(types, notes, about).to_bytes())
    finally:
        storage.end()
        storage.finish()


def _plan_boxes(checkpoint: Checkpoint, plan: ParallelPlan) -> dict[str, tuple[tuple[Box, ...], ...]]:
    """Key -> the boxes that each rank of the plan holds, without tensors that every rank holds whole.

    If an axis has no installed strategy, only the plan's rules apply.
    """
    model = [key.removeprefix(MODEL) for key in checkpoint.tensors if key.startswith(MODEL)]
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in model}
    for alias, name in checkpoint.manifest.model.aliases.items():
        names[name] = (*names.get(name, (name,)), alias)
    _check_patterns(plan, list(chain.from_iterable(names.values())))
    host = discover()
    axes = {registered.record.axis for registered in host.strategies().values()}
    installed = axes.issuperset(plan.degrees)
    strategies = resolve_strategies(plan, host, plan.world_size) if installed else ()
    sizes = tuple(plan.degrees.values())
    boxes = {}
    for key, source in checkpoint.tensors.items():
        if not key.startswith((MODEL, OPTIMIZER)) or not source.shape:
            continue
        name, shape = key.removeprefix(MODEL), source.shape
        if key.startswith(OPTIMIZER):
            name = key.removeprefix(OPTIMIZER).rpartition("/")[0]
            parameter = checkpoint.tensors.get(MODEL + name)
            if parameter is not None and parameter.shape != shape:
                continue
        ruled = next((n for n in names.get(name, ()) if plan.names(n)), name)
        if strategies:
            states = parameter_states(ruled, shape, plan, strategies)
        else:
            states = tuple(plan.parameter_states(ruled).values())
        if any(isinstance(s, int) and int(s) >= len(shape) for s in states):
            continue
        regions = (region_of(shape, sizes, at, states) for at in product(*map(range, sizes)))
        boxes[key] = tuple(tuple(there for there, _ in region_boxes(r) if box_numel(there)) for r in regions)
    return boxes


def _check_patterns(plan: ParallelPlan, names: list[str]) -> None:
    for index, rule in enumerate(plan.parameters):
        if not any(map(rule.matches, names)):
            text = f"no parameter of the checkpoint matches; its parameters are {listing(names, 4)}; pass a plan of this model"
            near = did_you_mean(rule.pattern, names)
            raise PlanError(f"parameters[{index}].pattern", rule.pattern, text, near)


def _write(checkpoint: Checkpoint, file: WriteFile, body: FileLayout, progress: Progress) -> list[str]:
    """Write one file; returns the checksums of its header and pieces."""
    sums = [block_sums(memoryview(body.header))]
    with complete_file(file) as writer:
        writer.write(body.header)
        for piece, _ in body.pieces:
            digits, rest = "", b""
            for values in read_rows(checkpoint, piece.key, piece.box):
                view = bytes_of_tensor(values)
                writer.write(view)
                progress(len(view))
                rest += bytes(view)
                whole = len(rest) // BLOCK * BLOCK
                digits, rest = digits + block_sums(memoryview(rest)[:whole]), rest[whole:]
            sums.append(digits + (block_sums(memoryview(rest)) if rest else ""))
    return sums
