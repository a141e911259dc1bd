"""The manifest of a checkpoint: its schema and checks. Every field is checked before use.

The file is JSON whose first line is ``{"sha256": "<digest of all bytes after this line>",``.  docs/checkpoints.md has the
whole format.
"""

from __future__ import annotations

import hashlib
import json
import re
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.checksum import BLOCK, DIGITS
from meshwright_checkpoint.format.safetensors_file import DTYPES
from meshwright_checkpoint.shards.write_shares import coverage_problem
from meshwright_dtensor.sharding.boxes import Box, box_numel

NAME = "manifest.json"
FORMAT = "meshwright-checkpoint"
VERSION = 2
MAX_BYTES = 1 << 30

Count = Annotated[StrictInt, Field(ge=0, lt=1 << 60)]
FileName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}$")]
Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]*$")]
HEAD_NBYTES = 79
"""Bytes of the first line."""
_FIRST = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


def has_form(head: bytes) -> bool:
    """Whether a file that starts so is a manifest of this package, of any version. head: `HEAD_NBYTES`, or the whole file."""
    return _FIRST.match(head) is not None


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class DataFile(_Model):
    """One safetensors file: its size, and the size and checksum of its header, including the 8 length bytes."""

    name: FileName
    nbytes: Count
    header_nbytes: Count
    header_sums: Digest


class Part(_Model):
    """A box of a tensor: row-major at `offset` bytes of file number `file`; `sums` has 32 digits for each MiB block."""

    box: tuple[tuple[Count, Count], ...]
    file: Count
    offset: Count
    sums: Digest


class StoredTensor(_Model):
    """One tensor: global shape, dtype as in safetensors, and the parts that tile it."""

    shape: tuple[Count, ...]
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class ModelInfo(_Model):
    """The model: class, config (transformers), aliases of tied names, and extra states of modules."""

    cls: StrictStr = ""
    config: dict[StrictStr, Any] | None = None
    aliases: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    extra_state: dict[StrictStr, Any] = Field(default_factory=dict)


class Group(_Model):
    """A parameter group of an optimizer: names of its parameters, and its options."""

    params: tuple[StrictStr, ...]
    options: Any


class OptimizerInfo(_Model):
    """The optimizer: class, groups, and states that are not tensors, by parameter name and key."""

    cls: StrictStr
    groups: tuple[Group, ...]
    values: dict[StrictStr, dict[StrictStr, Any]] = Field(default_factory=dict)


class RandomInfo(_Model):
    """Random streams, stored as tensors rng/<rank>/<stream>. Value: 1 if all ranks had the same, else the number of ranks."""

    streams: dict[StrictStr, Annotated[StrictInt, Field(ge=1, le=1 << 20)]]


class Manifest(_Model):
    """The manifest; docs/checkpoints.md has the format."""

    sha256: Digest = ""
    format: Literal["meshwright-checkpoint"] = FORMAT  # type: ignore[assignment]
    version: Literal[2] = 2
    id: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]
    created: StrictStr
    step: Count | None = None
    world_size: Count = 1
    versions: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    plan: dict[StrictStr, Any] | None = None
    model: ModelInfo = Field(default_factory=ModelInfo)
    optimizer: OptimizerInfo | None = None
    rng: RandomInfo | None = None
    extra: Any = None
    files: tuple[DataFile, ...] = ()
    tensors: dict[StrictStr, StoredTensor] = Field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file."""
        data = self.model_dump(mode="json", exclude={"sha256"})
        tensors = data.pop("tensors")

        def lines(fields: dict[str, Any]) -> str:
            compact = {k: json.dumps(v, separators=(",", ":"), allow_nan=False) for k, v in fields.items()}
            return ",\n".join(f"{json.dumps(key)}: {value}" for key, value in compact.items())

        body = f'{lines(data)},\n"tensors": {{\n{lines(tensors)}\n}}\n}}\n'.encode()
        return b'{"sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode() + body

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read and check the file.

        Raises:
            CorruptError: the manifest is damaged or inconsistent.
            CheckpointError: it has another version.
        """
        if len(data) > MAX_BYTES:
            raise CorruptError(f"{where} has {len(data)} bytes; a manifest has at most {MAX_BYTES}")
        first = _FIRST.match(data)
        if first is None:
            raise CorruptError(f"{where} is damaged: its first line is not a checksum")
        if hashlib.sha256(memoryview(data)[first.end() :]).hexdigest().encode() != first[1]:
            raise CorruptError(f"{where} is damaged: its checksum does not match")
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            # not UTF-8, no JSON, or nested to exhaust the stack
            raise CorruptError(f"{where} is damaged: {ascii(str(error))[:120]}") from None
        return cls.checked(values, where)

    @classmethod
    def checked(cls, data: Any, where: str) -> Manifest:
        """Check JSON values. Raises as `from_bytes`."""
        if isinstance(data, dict) and data.get("format") == FORMAT and data.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has version {ascii(data.get('version'))[:40]}; this meshwright-checkpoint reads version {VERSION}: "
                "use the release that wrote it, or a later one"
            )
        try:
            manifest = cls.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            at = ascii(".".join(str(x) for x in first["loc"]))[:120]
            raise CorruptError(f"{where} is damaged: {at}: {ascii(first['msg'])[:120]}") from None
        except RecursionError:
            raise CorruptError(f"{where} is damaged: it is nested too deep") from None
        for name, tensor in manifest.tensors.items():
            _check_tensor(manifest, name, tensor, where)
        return manifest


def _check_tensor(manifest: Manifest, name: str, tensor: StoredTensor, where: str) -> None:
    itemsize = DTYPES[tensor.dtype].itemsize
    boxes: list[Box] = []
    for part in tensor.parts:
        if part.file >= len(manifest.files):
            text = f"{where} is damaged: {name!a} refers to file {part.file}, of {len(manifest.files)}"
            raise CorruptError(text)
        file = manifest.files[part.file]
        nbytes = box_numel(part.box) * itemsize
        if part.offset < file.header_nbytes or part.offset + nbytes > file.nbytes:
            raise CorruptError(f"{where} is damaged: a part of {name!a} is not inside {file.name}")
        if len(part.sums) != -(-nbytes // BLOCK) * DIGITS:
            raise CorruptError(f"{where} is damaged: {name!a} has checksums for another size")
        boxes.append(part.box)
    problem = coverage_problem(tensor.shape, boxes)
    if problem:
        raise CorruptError(f"{where} is damaged: the parts of {name!a} {problem}")
