"""Write a checkpoint anew, for another number of ranks or another plan, in one process and little memory."""

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
from meshwright_checkpoint.storage.backend import CheckpointStorage
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
        plan: the layout of those ranks, which each then find their part in one file, in a few long runs, as its strategies
            would store it (ZeRO's shards too), or, where those are not installed, as its rules say. What the stages of a pipeline
            hold is not told apart: their ranks share each tensor evenly. Without a plan the bytes are divided evenly. It is kept
            as the checkpoint's plan.
        progress: is told bytes as they are written.

    Raises:
        CheckpointError: the path is taken.
        CorruptError: the checkpoint is damaged.
        PlanError: a rule of the plan speaks of no parameter of the checkpoint, or the plan is unsound.
        PluginError: the strategy that the plan names for an axis is not installed, and another is.
    """
    named = _names(checkpoint)
    layout = None
    if plan is not None:
        _check_patterns(plan, [name for names in named.values() for name in names])
        layout = _Layout(plan, _strategies(plan), named, checkpoint.tensors)
    tensors = {key: _catalogued(key, source, ranks, layout) for key, source in checkpoint.tensors.items()}
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
    """Name of every tensor of the model -> all names that it has there."""
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
            text = f"no parameter of the checkpoint matches; they are {listing(names, 4)}; give the plan of its model"
            raise PlanError(
                f"parameters[{index}].pattern", rule.pattern, text, did_you_mean(rule.pattern, names)
            )


def _strategies(plan: ParallelPlan) -> tuple[Strategy, ...]:
    """Those of the plan; none where not all of its axes have one, and the plan's own rules are all that is known."""
    host = discover()
    axes = {registered.record.axis for registered in host.strategies().values()}
    return resolve_strategies(plan, host, plan.world_size) if axes.issuperset(plan.degrees) else ()


@dataclass(frozen=True)
class _Layout:
    """How the ranks of a plan store the tensors of a checkpoint.

    Attributes:
        names: of every tensor of the model, all that it has there.
        tensors: what is stored.
    """

    plan: ParallelPlan
    strategies: tuple[Strategy, ...]
    names: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Source]

    def boxes(self, key: str) -> list[tuple[Box, ...]] | None:
        """What each rank holds of a tensor, as boxes; None for what every rank holds whole."""
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
        ruled = next((one for one in self.names.get(name, ()) if self.plan.parameter_rule(one)), name)
        if self.strategies:
            return parameter_states(ruled, shape, self.plan, self.strategies)
        return tuple(self.plan.parameter_states(ruled).values())


def _catalogued(key: str, source: Source, ranks: int, layout: _Layout | None) -> TensorLayout:
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
    """One file; the checksums of its pieces."""
    writer = storage.writer(name)
    sums = []
    try:
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
    except BaseException:
        writer.close(durable=False)
        raise
    writer.close()
    return sums
