"""Restricted unpickler for pickles of torch.distributed.checkpoint: it never runs code from the file.

Names in a fixed list become plain records. Only opcodes that such files need are allowed. All other names and opcodes are
rejected before anything is built. It is used only if the backend "dcp" is given by name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import torch

from meshwright_checkpoint.errors import CorruptError

MAX_NBYTES = 1 << 30
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, EOFError, MemoryError, OverflowError)
"""Errors of pickle for a damaged file, besides its own."""

_OPCODES = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT "
    "BINFLOAT STRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES SHORT_BINSTRING "
    "BINSTRING EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM "
    "SETITEMS EMPTY_SET ADDITEMS FROZENSET PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE GLOBAL "
    "STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID".split()
)
_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex "
    "StorageMeta _MEM_FORMAT_ENCODING".split()
)
_RECORDS = frozenset((_METADATA, name) for name in _METADATA_NAMES) | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
}


class Record:
    """Placeholder for a class or function of the list: its name, arguments and state."""

    kind = ""

    def __new__(cls, *args: Any) -> Record:
        made = object.__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: dict[str, Any] = getattr(self, "state", {})

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {"": state}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and (self.kind, _key(self)) == (other.kind, _key(other))

    def __hash__(self) -> int:
        return hash((self.kind, _key(self)))

    def get(self, name: str) -> Any:
        """An attribute of the state. Raises CorruptError if it is missing."""
        state = self.__dict__.get("state", {})
        if name not in state:
            raise CorruptError(f"a {self.kind} of the metadata has no {name}")
        return state[name]


def _key(record: Record) -> str:
    return repr(sorted((str(k), repr(v)) for k, v in record.__dict__.get("state", {}).items()))


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (Record,), {"kind": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and (name.endswith("Storage") and name.isidentifier()):
            return type(name, (Record,), {"kind": name})
        torch_constant = getattr(torch, name, None) if module == "torch" else None
        if isinstance(torch_constant, (torch.dtype, torch.layout, torch.memory_format)):
            return torch_constant
        text = f"it names {module}.{name}, which is not allowed in checkpoints of torch"
        raise pickle.UnpicklingError(text)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def safe_loads(data: bytes, where: str) -> Any:
    """Load a pickle as plain values and records.

    Raises CorruptError: the pickle is damaged, or uses names or opcodes that are not allowed. Nothing was run.
    """
    try:
        if len(data) > MAX_NBYTES:
            raise ValueError("too large")
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise ValueError(f"opcode {opcode.name}")
            if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data):
                # the memo table would get this length
                raise ValueError("memo index beyond the end")
        return _RestrictedUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, RecursionError, *_DAMAGE) as error:
        raise CorruptError(f"{where} is refused or damaged: {ascii(str(error))[:160]}") from None
