"""Records what the Python code of a call reads that may change, and what a compiled graph of the call would not repeat.

A graph holds the operations of one run. What the code between them read (attributes, globals, variables of enclosing
functions) is part of the graph as it was. So the run is followed instruction by instruction, in the frames of the user's code
and of torch's modules: names of attributes, values of globals and of enclosing functions, and calls whose result or effect is
outside of the model.
"""

from __future__ import annotations

import dis
import gc
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy
import torch

import meshwright_dtensor

_STANDARD = str(Path(sysconfig.get_paths()["stdlib"]))
_SITE = str(Path(sysconfig.get_paths()["purelib"]))
_TORCH = str(Path(torch.__file__).parent)
_MODULES = str(Path(_TORCH) / "nn/modules")
_CORE = str(Path(meshwright_dtensor.__file__).parent)
_HERE = str(Path(__file__).parents[1])
_SKIPPED = (
    _TORCH,
    _CORE,
    _HERE,
    str(Path(numpy.__file__).parent),
    "<",
)
# standard modules whose results differ from call to call
_CHANGING = {
    str(Path(_STANDARD) / name): name
    for name in ("os.py", "random.py", "uuid.py", "secrets.py", "datetime.py")
}
_PURE_MODULES = frozenset(
    "math cmath _operator operator itertools functools _functools collections _collections re _sre torch typing inspect "
    "dataclasses enum copy _struct types abc _abc _weakref _bisect _statistics numbers _thread _contextvars".split()
)
_HOOKING = frozenset(
    "register_hook register_post_accumulate_grad_hook register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook register_full_backward_pre_hook register_multi_grad_hook retain_grad".split()
)
_IMPURE_BUILTINS = frozenset(
    "print input open exec eval compile breakpoint globals locals setattr delattr".split()
)
_REFLECTION = frozenset("getattr hasattr".split())
_PURE_OWNERS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    list,
    tuple,
    dict,
    set,
    frozenset,
    slice,
    range,
    type,
    torch.Tensor,
)


@dataclass
class PythonReads:
    """What a call has read.

    Attributes:
        attributes: names of attributes that were read, of any object; None: any may have been, by reflection.
        globals: (id of the namespace, name) -> (namespace, value).
        cells: id -> (cell of an enclosing function, value).
        refusals: why a graph would differ from the code, in order.
    """

    attributes: set[str] | None = field(default_factory=set)
    globals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = field(default_factory=dict)
    cells: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        """Note a reason once."""
        if reason not in self.refusals:
            self.refusals.append(reason)


@contextmanager
def recorded_reads() -> Iterator[PythonReads]:
    """Record the reads of the code that runs inside, in this thread."""
    recorder = _Recorder()
    tracing, profiling = sys.gettrace(), sys.getprofile()
    sys.setprofile(recorder.on_call)
    sys.settrace(recorder.on_frame)
    try:
        yield recorder.reads
    finally:
        sys.settrace(tracing)
        sys.setprofile(profiling)
        recorder.look_up_cells()


class _Recorder:
    """The trace and profile functions of one recording."""

    def __init__(self) -> None:
        self.reads = PythonReads()
        # the core replaces it
        self._apply: CodeType = torch.autograd.Function.__dict__["apply"].__func__.__code__
        self._codes: dict[CodeType, None] = {}
        # namespaces of followed code by id, and the classes of its first arguments
        self._spaces: dict[int, dict[str, Any]] = {}
        self._owners: set[type] = set()
        # (code, name, id of the value) -> value
        self._free: dict[tuple[CodeType, str, int], Any] = {}

    def on_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A call of a function begins."""
        code = frame.f_code
        if code is self._apply and _calls_are_the_users(frame.f_back):
            function = frame.f_locals["cls"]
            if not function.__module__.startswith(("torch.", "meshwright_")):
                self.reads.refuse(
                    f"it applies {function.__qualname__}, an autograd.Function: what its backward reads is not known"
                )
        if not _is_followed(code.co_filename) or not _calls_are_the_users(frame.f_back):
            name = _CHANGING.get(code.co_filename)
            if name is not None and frame.f_back is not None and frame.f_back.f_trace is not None:
                self.reads.refuse(
                    f"it calls {code.co_qualname}() of {name}, whose result changes from call to call"
                )
            return None
        self._codes[code] = None
        self._spaces[id(frame.f_globals)] = frame.f_globals
        if code.co_argcount:
            self._owners.add(type(frame.f_locals.get(code.co_varnames[0])))
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self.on_instruction

    def on_instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        """An instruction of a followed frame is about to run."""
        if event == "opcode":
            read = _reads_of(frame.f_code).get(frame.f_lasti)
            if read is not None:
                kind, name = read
                if name in _HOOKING:
                    self.reads.refuse(f"it calls {name}(), whose effect is outside of a graph")
                if kind == "attribute":
                    if self.reads.attributes is not None:
                        if name in ("__dict__", "__class__"):
                            self.reads.attributes = None
                        else:
                            self.reads.attributes.add(name)
                elif kind == "global":
                    self._global(frame, name)
                elif kind == "free":
                    value = frame.f_locals.get(name)
                    self._free[frame.f_code, name, id(value)] = value
                else:
                    self.reads.refuse(f"it assigns the {kind} {name!r}")
        return self.on_instruction

    def _global(self, frame: FrameType, name: str) -> None:
        space = frame.f_globals
        if name in space:
            self.reads.globals.setdefault((id(space), name), (space, space[name]))

    def on_call(self, frame: FrameType, event: str, arg: Any) -> None:
        """A function written in C is called from a followed frame."""
        if event != "c_call" or frame.f_trace is None:
            return
        name = getattr(arg, "__name__", "")
        module = getattr(arg, "__module__", None)
        owner = getattr(arg, "__self__", None)
        if module == "builtins" and isinstance(owner, ModuleType):
            if name in _IMPURE_BUILTINS:
                self.reads.refuse(f"it calls {name}()")
            elif name in ("vars", "dir"):
                self.reads.attributes = None
            elif name in _REFLECTION:
                self._reflected(frame)
            return
        root = (module or "").partition(".")[0]
        if root in _PURE_MODULES or isinstance(owner, _PURE_OWNERS):
            return
        if owner is None or isinstance(owner, ModuleType):
            if module is None or root in ("builtins",):
                return
            self.reads.refuse(f"it calls {module}.{name}(), which may change from call to call")
            return
        kind = type(owner)
        if kind.__module__.partition(".")[0] in (
            "torch",
            "collections",
            "builtins",
            "itertools",
            "functools",
            "re",
            "enum",
        ):
            return
        self.reads.refuse(
            f"it calls {kind.__module__}.{kind.__qualname__}.{name}(), which may change from call to call"
        )

    def _reflected(self, frame: FrameType) -> None:
        """getattr(x, name): the name is one of the strings that the code has at hand."""
        if self.reads.attributes is not None:
            self.reads.attributes |= _strings(frame.f_code)
            self.reads.attributes.update(value for value in frame.f_locals.values() if type(value) is str)

    def look_up_cells(self) -> None:
        """Find the cells of the variables of enclosing functions that were read."""
        if not self._free:
            return
        # functions that followed code has made close over what that has read
        made = {const for code in self._codes for const in code.co_consts if isinstance(const, CodeType)}
        codes = {code for code, _, _ in self._free} - made
        functions = _functions_of(codes, self._spaces, self._owners)
        for (code, name, _), value in self._free.items():
            if code in made:
                continue
            cells = [
                cell
                for function in functions
                if function.__code__ is code
                for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
                if variable == name and _content(cell) is value
            ]
            if not cells:
                self.reads.refuse(
                    f"{code.co_qualname}() reads {name!r} of an enclosing function, which cannot be watched"
                )
            for cell in cells:
                self.reads.cells[id(cell)] = (cell, value)


def _functions_of(
    codes: Collection[CodeType], spaces: Mapping[int, dict[str, Any]], owners: Collection[type]
) -> list[FunctionType]:
    """The functions with these codes: methods of the classes, globals, and what their cells and wrappers hold."""
    if not codes:
        return []
    pending: list[Any] = [kind for owner in owners for kind in owner.__mro__]
    pending += [value for space in spaces.values() for value in space.values()]
    # objects that are not collected any more (gc.freeze) are not among the referrers
    pending += gc.get_referrers(*codes)
    functions: list[FunctionType] = []
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        value = getattr(value, "__func__", value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            if value.__code__ in codes:
                functions.append(value)
            pending += [_content(cell) for cell in value.__closure__ or ()]
            pending.append(getattr(value, "__wrapped__", None))
        elif isinstance(value, type):
            pending += vars(value).values()
        elif isinstance(value, property):
            pending += [value.fget]
        elif isinstance(value, partial):
            pending.append(value.func)
    return functions


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def _is_followed(filename: str) -> bool:
    """Whether code of this file is the user's, or that of a module of torch."""
    if filename.startswith(_MODULES):
        return not filename.endswith("module.py")
    if filename.startswith(_SKIPPED):
        return False
    return filename.startswith(_SITE) or not filename.startswith(_STANDARD)


def _is_library(filename: str) -> bool:
    """Whether code of this file is torch's or Python's own."""
    in_standard = filename.startswith(_STANDARD) and not filename.startswith(_SITE)
    return in_standard or filename.startswith((_TORCH, "<"))


def _calls_are_the_users(frame: FrameType | None) -> bool:
    """Whether a call is made by followed code, through torch perhaps; not by the rules of the core, which call plugins."""
    while frame is not None and frame.f_trace is None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_HERE):
        return True
    return frame.f_trace is not None


@lru_cache(maxsize=4096)
def _reads_of(code: CodeType) -> dict[int, tuple[str, str]]:
    """Offset of an instruction -> the (kind, name) of a variable it reads or assigns that may outlive the call."""
    reads: dict[int, tuple[str, str]] = {}
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads[instruction.offset] = ("global", value)
        elif "ATTR" in name or name == "LOAD_METHOD":
            # an assigned attribute has another value afterwards, as its watch then sees
            reads[instruction.offset] = ("attribute", value)
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF") and value in code.co_freevars:
            reads[instruction.offset] = ("free", value)
        elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            reads[instruction.offset] = ("global variable", value)
        elif name in ("STORE_DEREF", "DELETE_DEREF") and value in code.co_freevars:
            reads[instruction.offset] = ("nonlocal variable", value)
    return reads


@lru_cache(maxsize=4096)
def _strings(code: CodeType) -> frozenset[str]:
    return frozenset(const for const in code.co_consts if type(const) is str)
