"""Whether ranks read the same data: the same order of rows, and the same content of a row.

Ranks that share the rows of a batch compare all of it. Data ranks read different rows, so in a batch that is compared each of them
reads the first row too. Compared are the first three batches, and every 64th one after that.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import extremes
from meshwright_dtensor.model.batch_text import describe, first_difference
from meshwright_parallel.ranks import first_other

MAX_TEXT = 120
"""Characters of a rank's rows in an error."""


@dataclass(frozen=True)
class SharedRow:
    """Asks a dataset, as the last of the indices, for the content of a row that all ranks read.

    position: where the row is among those of this rank anyway; None if it is not.
    """

    index: Any
    position: int | None


@dataclass(frozen=True)
class RowsAndText:
    """Rows of a dataset, and the content of the shared row as text; "" where none was asked for."""

    rows: Any
    text: str


@dataclass(frozen=True)
class PartRead:
    """What this rank has read of a batch.

    Attributes:
        indices: of all rows of the batch.
        offset: of the part of this rank.
        form: names, shapes and dtypes of its tensors.
        dataset_rows: the length of the dataset, -1 where it has none.
        shared: the content of the shared row; "" if there is none.
        content: that of the part, to be compared with ranks that have the same; "" where it is not compared.
    """

    indices: Sequence[Any]
    offset: int
    form: str
    dataset_rows: int
    shared: str = ""
    content: str = ""


def row_text(row: Any) -> str:
    """The content of a row, for comparison: tensors, arrays and images by a checksum, numbers and short texts as they are."""
    return describe((pytree.tree_map(_plain, row),), {}, values=True)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Mapping):
        # a mapping of another class, such as the encodings of transformers
        return {str(key): pytree.tree_map(_plain, value) for key, value in leaf.items()}
    if hasattr(leaf, "__array_interface__") and not isinstance(leaf, torch.Tensor):
        with suppress(TypeError):
            return torch.from_numpy(np.array(leaf))
        # texts and objects
        return type(leaf).__name__
    if isinstance(leaf, bytes) or (isinstance(leaf, str) and len(leaf) >= MAX_TEXT):
        data = leaf if isinstance(leaf, bytes) else leaf.encode()
        return f"{len(leaf)} characters, {zlib.crc32(data):x}"
    return leaf


def length_of(dataset: Any) -> int:
    """The number of rows of a dataset, -1 where it has none."""
    with suppress(TypeError, NotImplementedError):
        return len(dataset)
    return -1


def check_same_rows(read: PartRead, mesh: DeviceMesh, alike: Sequence[int]) -> None:
    """Raise UsageError, on every rank, where ranks read other rows, other content, or collate it to other shapes.

    alike: the axes of the mesh along which ranks have the same rows.
    """
    rows = f"{len(read.indices)} rows: {list(read.indices)}"
    sums = [read.dataset_rows, *(zlib.crc32(text.encode()) for text in (rows, read.shared, read.form))]
    differs = False
    if read.content:
        here = [zlib.crc32(read.content.encode())]
        for axis in alike:
            ((least, most),) = extremes(here, mesh.get_group(axis))
            differs = differs or least != most
    *pairs, (_, any_differs) = extremes([*sums, int(differs)], None)
    length, order, content, form = (least != most for least, most in pairs)
    if length:
        rank, first, other = first_other(str(read.dataset_rows))
        rule, fix = f"has a dataset of {other} rows, rank 0 one of {first}", "give every rank the same data"
    elif order:
        rank, *texts = first_other(rows)
        first, other = (text if len(text) < MAX_TEXT else text[:MAX_TEXT] + "..." for text in texts)
        rule = f"has another order of rows than rank 0 ({other} against {first})"
        fix = "seed the sampler alike on every rank"
    elif content or any_differs:
        rank, rule = _other_content(read, content)
        fix = "give every rank the same data, and let a row depend on its index alone (random numbers of the dataset, too)"
    elif form:
        rank, first, other = first_other(read.form)
        rule = f"has another shape of rows than rank 0 ({other} against {first})"
        fix = "pad to a length that does not depend on the rows"
    else:
        return
    raise UsageError(f"rank {rank} {rule}; {fix}, or loop over the plain loader")


def _other_content(read: PartRead, shared: bool) -> tuple[int, str]:
    """The first rank whose rows have another content than those of an earlier one, and in what (a collective call)."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (0, read.shared) if shared else (read.offset, read.content))
    seen: dict[int, tuple[int, str]] = {}
    for rank, (offset, text) in enumerate(told):
        before, expected = seen.setdefault(offset, (rank, text))
        if text != expected:
            what = f"row {read.indices[0]!r}" if shared else f"rows from place {offset} of the batch on"
            return rank, f"reads other data than rank {before} ({what}: {first_difference(expected, text)})"
    raise AssertionError("ranks differ, and their texts do not")
