"""Offline reshard: rewrite a checkpoint for other ranks or another plan, in one process and little memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.convert.verify import row_blocks
from meshwright_checkpoint.format.checksum import BLOCK, block_sums
from meshwright_checkpoint.format.dtypes import dtype_name
from meshwright_checkpoint.format.manifest import Manifest
from meshwright_checkpoint.format.safetensors_file import FileLayout, lay_out_file
from meshwright_checkpoint.read.store import read
from meshwright_checkpoint.read.wanted import Source, Wanted
from meshwright_checkpoint.shards.write_shares import TensorLayout, plan_writes
from meshwright_checkpoint.state.collect import MODEL, OPTIMIZER
from meshwright_checkpoint.storage.backend import CheckpointStorage, complete_file
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.sharding.boxes import Box, box_numel, box_shape, region_boxes, region_of, whole_box
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.strategy.resolve import parameter_states, resolve_strategies
from meshwright_dtensor.utils.names import did_you_mean, listing


def rewrite(
    checkpoint: Checkpoint,
    storage: CheckpointStorage,
    ranks: int,
    plan: ParallelPlan | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
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
    named = _names(checkpoint)
    layout = None
    if plan is not None:
        _check_patterns(plan, [name for names in named.values() for name in names])
        layout = _PlanLayout(plan, _strategies(plan), named, checkpoint.tensors)
    tensors = {key: _tensor_layout(key, source, ranks, layout) for key, source in checkpoint.tensors.items()}
    shapes = {key: (source.shape, source.dtype) for key, source in checkpoint.tensors.items()}
    save_id = uuid.uuid4().hex
    old = checkpoint.manifest
    stored: dict[str, Any] = {
        key: {"shape": list(shape), "dtype": dtype_name(dtype, key), "parts": []}
        for key, (shape, dtype) in shapes.items()
    }
    files = []
    storage.begin(save_id)
    try:
        storage.claim(save_id, 0)
        for rank, pieces in enumerate(plan_writes(tensors, ranks)):
            body = lay_out_file(pieces, shapes, {"format": "pt", "checkpoint": save_id, "file": str(rank)})
            name = f"data-{rank:05d}.safetensors"
            sums = _write(checkpoint, storage, name, body, progress)
            header = block_sums(memoryview(body.header))
            files.append(
                {
                    "name": name,
                    "nbytes": body.nbytes,
                    "header_nbytes": len(body.header),
                    "header_sums": header,
                }
            )
            for (piece, offset), digits in zip(body.pieces, sums, strict=True):
                stored[piece.key]["parts"].append(
                    {"box": piece.box, "file": rank, "offset": offset, "sums": digits}
                )
        data = {
            **old.model_dump(mode="json"),
            "sha256": "",
            "id": save_id,
            "world_size": ranks,
            "files": files,
        }
        if plan is not None:
            data["plan"] = json.loads(plan.to_json())
        storage.commit(Manifest.checked({**data, "tensors": stored}, "the manifest to be written").to_bytes())
    finally:
        storage.end()
        storage.finish()


def _names(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Name of each tensor of the model -> all its names, including aliases."""
    names: dict[str, tuple[str, ...]] = {
        key.removeprefix(MODEL): (key.removeprefix(MODEL),)
        for key in checkpoint.tensors
        if key.startswith(MODEL)
    }
    for alias, name in checkpoint.manifest.model.aliases.items():
        names[name] = (*names.get(name, (name,)), alias)
    return names


def _check_patterns(plan: ParallelPlan, names: list[str]) -> None:
    for index, rule in enumerate(plan.parameters):
        if not any(rule.matches(name) for name in names):
            text = f"no parameter of the checkpoint matches; its parameters are {listing(names, 4)}; pass a plan of this model"
            raise PlanError(
                f"parameters[{index}].pattern", rule.pattern, text, did_you_mean(rule.pattern, names)
            )


def _strategies(plan: ParallelPlan) -> tuple[Strategy, ...]:
    """The strategies of the plan; none if an axis has no installed strategy. Then only the plan's rules apply."""
    host = discover()
    axes = {registered.record.axis for registered in host.strategies().values()}
    return resolve_strategies(plan, host, plan.world_size) if axes.issuperset(plan.degrees) else ()


@dataclass(frozen=True)
class _PlanLayout:
    """How the ranks of a plan store the tensors of a checkpoint.

    Attributes:
        names: see `_names`.
        tensors: the stored tensors.
    """

    plan: ParallelPlan
    strategies: tuple[Strategy, ...]
    names: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Source]

    def boxes(self, key: str) -> list[tuple[Box, ...]] | None:
        """The boxes of a tensor that each rank holds; None if every rank holds all of it."""
        if not key.startswith((MODEL, OPTIMIZER)):
            return None
        state_of, name = key.startswith(OPTIMIZER), key.removeprefix(MODEL)
        if state_of:
            name = key.removeprefix(OPTIMIZER).rpartition("/")[0]
        shape = self.tensors[key].shape
        parameter = self.tensors.get(MODEL + name)
        if not shape or (state_of and parameter is not None and parameter.shape != shape):
            return None
        states = self._states(name, shape)
        if any(isinstance(s, int) and int(s) >= len(shape) for s in states):
            return None
        sizes = tuple(self.plan.degrees.values())
        regions = (region_of(shape, sizes, at, states) for at in product(*map(range, sizes)))
        return [tuple(there for there, _ in region_boxes(r) if box_numel(there)) for r in regions]

    def _states(self, name: str, shape: tuple[int, ...]) -> tuple[State, ...]:
        ruled = next((n for n in self.names.get(name, ()) if self.plan.parameter_rule(n)), name)
        if self.strategies:
            return parameter_states(ruled, shape, self.plan, self.strategies)
        return tuple(self.plan.parameter_states(ruled).values())


def _tensor_layout(key: str, source: Source, ranks: int, layout: _PlanLayout | None) -> TensorLayout:
    boxes = None if layout is None else layout.boxes(key)
    if boxes is None:
        boxes = [(whole_box(source.shape),) if 0 not in source.shape else ()] * ranks
    return TensorLayout(source.shape, source.dtype.itemsize, tuple(boxes))


def _write(
    checkpoint: Checkpoint,
    storage: CheckpointStorage,
    name: str,
    body: FileLayout,
    progress: Callable[[int], None],
) -> list[str]:
    """Write one file; returns the checksums of its pieces."""
    sums = []
    with complete_file(storage.writer(name)) as writer:
        writer.write(body.header)
        for piece, _ in body.pieces:
            source = checkpoint.tensors[piece.key]
            part = Source(box_shape(piece.box), source.dtype, ())
            digits, rest = "", b""
            for inner in row_blocks(part):
                target = torch.empty(box_shape(inner), dtype=source.dtype)
                box = tuple((base + at, n) for (base, _), (at, n) in zip(piece.box, inner, strict=True))
                read(checkpoint, [Wanted(piece.key, box, target)])
                view = bytes_of_tensor(target)
                writer.write(view)
                progress(len(view))
                rest += bytes(view)
                whole = len(rest) // BLOCK * BLOCK
                digits, rest = digits + block_sums(memoryview(rest)[:whole]), rest[whole:]
            sums.append(digits + (block_sums(memoryview(rest)) if rest else ""))
    return sums
