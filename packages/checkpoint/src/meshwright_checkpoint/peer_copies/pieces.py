"""Fill the tensors of ranks from pieces of files that ranks hold in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright_checkpoint.format.manifest import StoredTensor
from meshwright_checkpoint.format.safetensors_file import DTYPES
from meshwright_checkpoint.peer_copies.held_file import HeldFile
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read.wanted import Wanted
from meshwright_checkpoint.reshard.transfer import plan_rounds, run_rounds
from meshwright_checkpoint.shards.local_shards import LocalShards, box_nbytes
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.sharding.boxes import Box, box_shape, intersect, relative_to, slice_of

Part = tuple[Box, torch.Tensor]


@dataclass(frozen=True)
class Pieces(LocalShards):
    """Boxes of a tensor, each in memory of its own. `parts`: box and its values."""

    parts: tuple[Part, ...] = ()

    def view(self, box: Box) -> torch.Tensor:
        there, values = next(part for part in self.parts if intersect(box, part[0]) == box)
        return slice_of(values, relative_to(box, there))


def _pieces(shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]) -> Pieces:
    boxes = tuple((box, box) for box, _ in parts)
    return Pieces(tuple(shape), dtype, torch.empty(0, dtype=dtype, device=HOST), boxes, tuple(parts))


def held_pieces(files: Iterable[HeldFile], tensors: Mapping[str, StoredTensor]) -> dict[str, LocalShards]:
    """Key -> what the files have of a tensor. `tensors`: of the manifest."""
    parts: dict[str, dict[Box, torch.Tensor]] = defaultdict(dict)
    for file in files:
        for key, pairs, offset, _ in file.note["pieces"]:
            box = tuple((start, length) for start, length in pairs)
            dtype = DTYPES[tensors[key].dtype]
            data = file.memory[offset : offset + box_nbytes(box, dtype)]
            parts[key][box] = data.view(dtype).view(box_shape(box))
    return {
        key: _pieces(tensors[key].shape, DTYPES[tensors[key].dtype], [*held.items()])
        for key, held in parts.items()
    }


def fill(
    have: dict[str, LocalShards], shapes: dict[str, tuple[int, ...]], wanted: Sequence[Wanted], ranks: Ranks
) -> None:
    """Fill all targets of all ranks (a collective call).

    Args:
        have: key -> the pieces that this rank has.
        shapes: key -> global shape.
        wanted: the targets of this rank, of the dtype that is held.
    """
    # a value that two tensors of a rank take is brought twice
    layers: list[dict[str, list[Part]]] = []
    for want in wanted:
        if not want.target.numel():
            continue
        for layer in layers:
            if all(intersect(want.box, box) is None for box, _ in layer.get(want.key, ())):
                break
        else:
            layer = {}
            layers.append(layer)
        layer.setdefault(want.key, []).append((want.box, want.target))
    (count,) = ranks.most([len(layers)])
    for layer in layers + [{}] * (count - len(layers)):
        targets: dict[str, LocalShards] = {
            key: _pieces(shapes[key], parts[0][1].dtype, parts) for key, parts in layer.items()
        }
        run_rounds(plan_rounds(have, targets, ranks), have, targets, {}, ranks)
