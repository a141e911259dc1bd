"""What a function tells: where its code is, whether a hook may give another result and runs, whether it refers to a module."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright_dtensor._torch.core import MODULE_CALL

_RETURN_NOTHING = frozenset({"append", "extend", "insert", "print"})
"""Functions that a lambda may end with and still return nothing."""
_CALLS_HOOKS = (MODULE_CALL, *(code for code in MODULE_CALL.co_consts if isinstance(code, CodeType)))


def code_of(hook: Callable[..., Any]) -> CodeType | None:
    """The code of a hook: of a function, a method, a partial of one, or a callable object."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    for function in (hook, inspect.getattr_static(type(hook), "__call__", None)):
        function = getattr(function, "__func__", function)
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            return code
    return None


def returns_nothing(hook: Callable[..., Any]) -> bool:
    """Whether the code of a hook shows that it never gives another result."""
    code = code_of(hook)
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    called = ""
    for before, step in itertools.pairwise(steps):
        if step.opname.startswith("LOAD_") and isinstance(step.argval, str):
            called = step.argval if step.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL") else called
        if step.opname == "RETURN_VALUE":
            nothing = before.opname == "LOAD_CONST" and before.argval is None
            if not nothing and not (before.opname == "CALL" and called in _RETURN_NOTHING):
                return False
        elif step.opname == "RETURN_CONST" and step.argval is not None:
            return False
    return True


def refers_to_module(function: object) -> bool:
    """Whether a function, or a function or object that it keeps, refers to a module or to a method of one."""
    waiting: list[Any] = [function]
    # the values are kept, so that no other gets the id
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if isinstance(value, nn.Module):
            return True
        if id(value) not in seen and not isinstance(value, (type, ModuleType, str, torch.Tensor)):
            seen[id(value)] = value
            waiting += _kept(value)
    return False


def _kept(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    if isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            # an empty cell
            with contextlib.suppress(ValueError):
                yield cell.cell_contents
    if isinstance(value, (list, tuple, set)):
        yield from value
    if isinstance(value, dict):
        yield from value.values()


def in_forward_hook() -> bool:
    """Whether a forward hook or pre-hook of a module has called this."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        caller = frame.f_back
        hook: Any = caller.f_locals.get("hook") if caller.f_code in _CALLS_HOOKS else None
        if hook is not None and code_of(hook) is frame.f_code:
            return True
        frame = caller
    return False
