"""Restricted unpickler for pickles of torch.distributed.checkpoint: it never runs code from the file.

Names in a fixed list become plain records. Only opcodes that such files need are allowed. All other names and opcodes are
rejected before anything is built. A few bytes can describe a value that refers to itself again and again, and would be larger than
any memory when it is written out or hashed: such values are rejected too. It is used only if the backend "dcp" is given by name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, ClassVar

import torch

from meshwright_checkpoint.errors import CorruptError

MAX_NBYTES = 1 << 30
MAX_KEY, MAX_DEPTH = 100, 100
"""Values in a key of a dict, and containers in each other."""
MAX_FIELDS = 100
"""Arguments, attributes or dimensions of one object: they are copied, and a few bytes can ask for the copy again."""
MAX_SHARED = 64
"""Values for each byte of a pickle, with those that it refers to written out at each place."""
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
        # a copy, which does not grow once this is a key
        self.state = dict(state) if isinstance(state, dict) else {"": state}

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


def _key(record: Record) -> tuple[Any, ...]:
    return tuple(sorted(record.__dict__.get("state", {}).items()))


_CONTAINERS = (tuple, list, set, frozenset, dict, Record)


def _inner(value: Any) -> Iterable[Any]:
    """The values that a value consists of."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    return value.__dict__.values() if isinstance(value, Record) else ()


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise ValueError for a key that is more than a name, a number or a few of them: a dict hashes all that is in it."""
    for key in keys:
        count, todo = 0, [key]
        while todo:
            count += 1
            if count > MAX_KEY:
                raise ValueError("a key is too large")
            todo.extend(islice(_inner(todo.pop()), MAX_KEY))


def _extent(value: Any, extents: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """How many values there are in a value written out, and how deep. `extents`: of containers. Raises ValueError: too deep."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    if not isinstance(value, _CONTAINERS):
        return 1, 1
    if id(value) not in extents:
        parts = [_extent(part, extents, depth + 1) for part in _inner(value)]
        count, height = 1 + sum(n for n, _ in parts), 1 + max((h for _, h in parts), default=0)
        if height > MAX_DEPTH:
            raise ValueError("nested too deep")
        extents[id(value)] = count, height
    return extents[id(value)]


def _checked(opcode: bytes, check: Callable[[Any], None]) -> Callable[[Any], None]:
    """The step of the unpickler for an opcode, after a check of the unpickler."""
    load = pickle._Unpickler.dispatch[opcode[0]]

    def checked(unpickler: Any) -> None:
        check(unpickler)
        load(unpickler)

    return checked


def _keys_at(places: slice) -> Callable[[Any], None]:
    """The check of keys at these places of the stack."""
    return lambda unpickler: _check_keys(unpickler.stack[places])


def _check_call(unpickler: Any) -> None:
    """Raise ValueError for a call whose arguments are not a few, or that would hash or copy what is in them."""
    called, arguments = unpickler.stack[-2:]
    if type(arguments) is not tuple or len(arguments) > MAX_FIELDS:
        raise ValueError("the arguments of a call are too many, or no tuple")
    if called is OrderedDict and arguments:
        # pickle gives its items later, and their keys are checked
        raise ValueError("an OrderedDict is made with arguments")
    if called is tuple and any(len(sizes) > MAX_FIELDS for sizes in arguments):
        raise ValueError("a size is too large")


def _build(unpickler: Any) -> None:
    state = unpickler.stack.pop()
    made = unpickler.stack[-1]
    if isinstance(made, Record):
        if isinstance(state, dict) and len(state) > MAX_FIELDS:
            raise ValueError(f"the attributes of a {made.kind} are too many")
        made.__setstate__(state)
    elif type(made) is not OrderedDict:
        # the attributes of a dict, as those that torch sets, are left out
        raise ValueError("it sets attributes of a value that has none")


class _RestrictedUnpickler(pickle._Unpickler):
    # the one in Python: opcodes that hash values check them first
    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch | {
        opcode[0]: _checked(opcode, check)
        for opcode, check in (
            (pickle.SETITEM, _keys_at(slice(-2, -1))),
            # what came after the mark
            (pickle.SETITEMS, _keys_at(slice(0, None, 2))),
            (pickle.DICT, _keys_at(slice(0, None, 2))),
            (pickle.ADDITEMS, _keys_at(slice(None))),
            (pickle.FROZENSET, _keys_at(slice(None))),
            (pickle.REDUCE, _check_call),
            (pickle.NEWOBJ, _check_call),
        )
    }
    dispatch[pickle.BUILD[0]] = _build

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
        value = _RestrictedUnpickler(io.BytesIO(data)).load()
        if _extent(value, {})[0] > MAX_SHARED * len(data) + MAX_KEY:
            raise ValueError("it refers to its own parts too often")
        return value
    except (pickle.UnpicklingError, RecursionError, *_DAMAGE) as error:
        raise CorruptError(f"{where} is refused or damaged: {ascii(str(error))[:160]}") from None
