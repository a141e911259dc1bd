"""Read checkpoints of torch.distributed.checkpoint (DCP) directly into shards, without unpickling.

A DCP directory has the pickle ``.metadata`` and files of chunks. Each chunk is a zip written by `torch.save`: a small pickle
and the uncompressed bytes of a tensor. Pickles go through the restricted unpickler of :mod:`safe_unpickle`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright_checkpoint.dcp.safe_unpickle import MAX_NBYTES, Record, safe_loads
from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.manifest import NAME
from meshwright_checkpoint.read.wanted import Fragment, ReadFile, Source
from meshwright_checkpoint.storage.checkpoint import OpenFiles
from meshwright_checkpoint.storage.file_reader import Reader
from meshwright_dtensor.sharding.boxes import box_numel

METADATA = ".metadata"
MAX_VALUE_NBYTES, MAX_NAME = 64 << 20, 255
_DAMAGE = (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError, OverflowError)
"""Errors of zipfile for a damaged archive."""


class FileWindow(io.RawIOBase):
    """A range of a file as a file object, for zipfile, and as a ReadFile. DcpFiles owns and closes the file."""

    def __init__(self, file: ReadFile, start: int, nbytes: int) -> None:
        super().__init__()
        self.file, self.start, self.nbytes, self.where, self.at = file, start, nbytes, file.where, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self.at, self.nbytes)[whence]
        if at < 0:
            raise ValueError("before the start")
        self.at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self.nbytes - self.at, 0)]
        if len(view):
            self.read_into(view, self.at)
            self.at += len(view)
        return len(view)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.file.read_into(buffer, self.start + offset)


class DcpFiles(OpenFiles):
    """Tensors and values of a DCP directory, by the names that it gives them.

    Attributes:
        tensors: name -> stored tensor; its files are named "<file>:<offset>:<length>".
        values: name -> file, offset and length of a value that is not a tensor.
        paths: name -> keys of the nested dicts that were joined to the name.

    Raises:
        CheckpointError: there is no DCP checkpoint.
        CorruptError: the metadata are damaged, or are a pickle of something else.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.where = str(path)
        if not (path / METADATA).is_file():
            hint = "; it is a checkpoint of meshwright: leave out backend" if (path / NAME).is_file() else ""
            text = f"{path} is not a checkpoint of torch.distributed.checkpoint: it has no {METADATA}{hint}"
            raise CheckpointError(text)
        nbytes = (path / METADATA).stat().st_size
        if nbytes > MAX_NBYTES:
            raise CorruptError(f"{path / METADATA} has {nbytes} bytes; metadata have at most {MAX_NBYTES}")
        metadata = safe_loads((path / METADATA).read_bytes(), str(path / METADATA))
        try:
            self.tensors, self.values = _described(metadata)
            given = metadata.state.get("planner_data")
            self.paths: dict[str, tuple[Any, ...]] = {
                str(key): tuple(value) for key, value in (given if isinstance(given, dict) else {}).items()
            }
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CorruptError(f"{path / METADATA} is damaged: {ascii(str(error))[:100]}") from None

    def value(self, name: str) -> Any:
        """The value of a name that is not a tensor. Raises CorruptError if it is not a plain value."""
        with self._archive(*self.values[name], what=name) as archive:
            return safe_loads(_read(archive, "data.pkl", MAX_VALUE_NBYTES, name), f"{name} in {self.where}")

    def file(self, name: str) -> ReadFile:
        """The bytes of a chunk. Raises CorruptError if it is not one contiguous tensor."""
        file, offset, length = name.rsplit(":", 2)
        with self._archive(file, int(offset), int(length), what=name) as archive:
            rebuilt = safe_loads(_read(archive, "data.pkl", 1 << 16, name), f"{name} in {self.where}")
            members = [m for m in archive.infolist() if m.filename.endswith("/data/0")]
            if _read(archive, "byteorder", 16, name, default=b"little") != b"little" or len(members) != 1:
                raise CorruptError(f"{self.where}: {name} is not a single tensor of little-endian numbers")
            _check_contiguous(rebuilt, f"{self.where}: {name}")
            member = members[0]
            if member.compress_type != zipfile.ZIP_STORED:
                raise CorruptError(f"{self.where}: {name} is compressed")
            opened = self._open(file)
            # the local header may have a longer name and extra field than the central directory
            head = bytearray(30)
            opened.read_into(memoryview(head), int(offset) + member.header_offset)
            skip = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            start = int(offset) + member.header_offset + skip
            if head[:4] != b"PK\x03\x04" or start + member.file_size > int(offset) + int(length):
                raise CorruptError(f"{self.where}: {name} is damaged")
            return FileWindow(opened, start, member.file_size)

    def _archive(self, file: str, offset: int, length: int, what: str) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(io.BufferedReader(FileWindow(self._open(file), offset, length)))
        except _DAMAGE as error:
            text = f"{self.where}: {what} is damaged, or was not written by torch.save ({ascii(str(error))[:80]})"
            raise CorruptError(text) from None

    def _open(self, name: str) -> ReadFile:
        if Path(name).name != name or name.startswith("."):
            text = f"{self.where} names the file {ascii(name)[:80]}; files must be next to the metadata"
            raise CorruptError(text)
        if name not in self._files:
            self._files[name] = Reader(self.path / name)
        return self._files[name]


def _read(archive: zipfile.ZipFile, name: str, limit: int, what: str, default: bytes | None = None) -> bytes:
    members = [m for m in archive.infolist() if m.filename.partition("/")[2] == name]
    if not members and default is not None:
        return default
    if len(members) != 1 or members[0].compress_type != zipfile.ZIP_STORED or members[0].file_size > limit:
        raise CorruptError(f"{what} has no valid {name}")
    try:
        return archive.read(members[0])
    except _DAMAGE as error:
        raise CorruptError(f"{what} is damaged: {ascii(str(error))[:80]}") from None


def _check_contiguous(rebuilt: Any, where: str) -> None:
    """Check `_rebuild_tensor_v2(storage, offset, size, stride, ...)`: the tensor must fill its storage contiguously."""
    if not isinstance(rebuilt, Record) or not rebuilt.kind.startswith("_rebuild_tensor"):
        raise CorruptError(f"{where} is not a tensor")
    _, offset, size, stride = rebuilt.args[:4]
    expected = [prod(max(n, 1) for n in size[dim + 1 :]) for dim in range(len(size))]
    if offset != 0 or any(n > 1 and a != b for n, a, b in zip(size, stride, expected, strict=True)):
        raise CorruptError(f"{where} is not contiguous")


def _locations(metadata: Record) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    """(name, offsets of a chunk) -> (file, first byte, bytes); None for the offsets of a value that is no tensor."""
    locations: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in metadata.get("storage_data").items():
        if info.state.get("transform_descriptors"):
            raise ValueError("files are compressed, which is not supported")
        # a default is not stored
        offset = index.state.get("offset")
        at, length = info.get("offset"), info.get("length")
        if not all(type(x) is int and x >= 0 for x in (at, length)):
            raise ValueError("negative sizes")
        key = (str(index.get("fqn")), None if offset is None else tuple(offset))
        # it is written into the name of each chunk
        if len(file := str(info.get("relative_path"))) > MAX_NAME:
            raise ValueError("a file name is too long")
        locations[key] = (file, at, length)
    return locations


def _described(metadata: Any) -> tuple[Mapping[str, Source], dict[str, tuple[str, int, int]]]:
    if not isinstance(metadata, Record) or metadata.kind != "Metadata":
        raise ValueError("no Metadata")
    locations = _locations(metadata)
    tensors: dict[str, Source] = {}
    values: dict[str, tuple[str, int, int]] = {}
    for name, stored in metadata.get("state_dict_metadata").items():
        if stored.kind == "BytesStorageMetadata":
            if (name, None) in locations:
                values[str(name)] = locations[name, None]
            continue
        shape = tuple(int(n) for n in stored.get("size"))
        state = stored.get("properties").__dict__.get("state", {})
        # TensorProperties pickles itself as a tuple that starts with its dtype
        dtype = state.get("dtype") or next(iter(state.get("", ())), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor without dtype")
        fragments = []
        for chunk in stored.get("chunks"):
            pairs = zip(chunk.get("offsets"), chunk.get("sizes"), strict=True)
            box = tuple((int(start), int(length)) for start, length in pairs)
            offsets = tuple(start for start, _ in box)
            file, at, length = locations.get((name, offsets)) or locations[name, None]
            if box_numel(box):
                fragments.append(Fragment(box, f"{file}:{at}:{length}", 0))
        tensors[str(name)] = Source(shape, dtype, tuple(fragments))
    return tensors, values
