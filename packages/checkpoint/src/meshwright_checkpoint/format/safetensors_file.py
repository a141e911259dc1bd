"""Write and read the header of a safetensors file; names of dtypes in it.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.shards.local_shards import box_nbytes, box_text
from meshwright_checkpoint.shards.write_shares import Piece
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.sharding.boxes import box_shape

# safetensors name -> dtype
DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "C64": torch.complex64,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Key -> shape and dtype."""
ALIGN = 4096
"""The first tensor's offset is a multiple of this."""
MAX_HEADER = 100 << 20


def dtype_name(dtype: torch.dtype, of: str) -> str:
    """The safetensors name of a dtype; `of` names the tensor in the error. Raises UnsupportedError."""
    name = _NAMES.get(dtype)
    if name is None:
        text = f"{of} has dtype {dtype}, which safetensors files cannot hold; convert it to one of {', '.join(DTYPES)}"
        raise UnsupportedError(text)
    return name


@dataclass(frozen=True)
class FileLayout:
    """Header, pieces with their file offsets in byte order, and size of one file."""

    header: bytes
    pieces: tuple[tuple[Piece, int], ...]
    nbytes: int


def lay_out_file(pieces: Sequence[Piece], shapes: Shapes, metadata: Mapping[str, str]) -> FileLayout:
    """Lay out a file of `pieces`, in descending order of the power of two that divides their size.

    So every tensor is aligned to its element size, and tensors of whole pages to pages, for direct reads and writes.

    A piece that is a whole tensor is stored under its key, others under key and box: "model/w[0:4, 0:8]".
    """

    def alignment(piece: Piece) -> int:
        nbytes = box_nbytes(piece.box, shapes[piece.key][1])
        return min(nbytes & -nbytes or ALIGN, ALIGN)

    # the sort is stable
    ordered = sorted(pieces, key=alignment, reverse=True)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at, placed = 0, []
    for piece in ordered:
        shape, dtype = shapes[piece.key]
        name = piece.key if box_shape(piece.box) == shape else piece.key + box_text(piece.box)
        end = at + box_nbytes(piece.box, dtype)
        about = {"dtype": dtype_name(dtype, piece.key), "shape": list(box_shape(piece.box))}
        entries[name] = {**about, "data_offsets": [at, end]}
        placed.append((piece, at))
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    header = len(text).to_bytes(8, "little") + text
    shifted = tuple((piece, start + len(header)) for piece, start in placed)
    return FileLayout(header, shifted, at + len(header))


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file: dtype, shape, and its offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(head: bytes, nbytes: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors and metadata of a file of `nbytes` that starts with `head` (length and header). Raises CorruptError."""
    problem = f"{where} is not a valid safetensors file"
    try:
        data = json.loads(head[8:])
        metadata = data.pop("__metadata__", {})
        entries = {}
        for name, value in data.items():
            start, end = value["data_offsets"]
            shape = tuple(value["shape"])
            if not all(type(x) is int and x >= 0 for x in (start, end, *shape)):
                raise ValueError("negative sizes")
            if end - start != prod(shape) * DTYPES[value["dtype"]].itemsize or len(head) + end > nbytes:
                raise ValueError(f"{name!a} has wrong offsets")
            entries[name] = Entry(value["dtype"], shape, len(head) + start)
        return entries, {str(k): str(v) for k, v in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{problem}: {type(error).__name__} {ascii(str(error))[:100]}") from None


def header_length(first: bytes, nbytes: int, where: str) -> int:
    """Length of the header from the first eight bytes of a file of `nbytes`. Raises CorruptError."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(MAX_HEADER, nbytes - 8):
        text = f"{where} is not a valid safetensors file: its header would have {length} bytes, the file has {nbytes}"
        raise CorruptError(text)
    return length
