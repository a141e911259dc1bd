"""Which forward hook an error came out of: a hook that reads values costs a pipeline its schedule, and users should know which."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from meshwright_pipeline._torch import hooks_of, pre_hooks_of


def hook_in(model: nn.Module, error: BaseException) -> str:
    """The hook of a module of `model` that was running when `error` was raised, in words; "" where none was."""
    codes = {
        code: f"{kind} {getattr(hook, '__name__', type(hook).__name__)!r} of module {name!r}"
        for name, module in model.named_modules()
        for kind, hooks in (("hook", hooks_of(module)), ("pre-hook", pre_hooks_of(module)))
        for hook in hooks.values()
        if (code := _code(hook)) is not None
    }
    return next((codes[code] for code in _running(error) if code in codes), "") if codes else ""


def _running(error: BaseException) -> Iterator[CodeType]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame.f_code
        at = at.tb_next


def _code(hook: Callable[..., Any]) -> CodeType | None:
    """What a hook runs: that of a function, a method, a partial of one, or of an object that can be called."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    for one in (hook, inspect.getattr_static(type(hook), "__call__", None)):
        found = getattr(one, "__code__", None) or getattr(getattr(one, "__func__", None), "__code__", None)
        if isinstance(found, CodeType):
            return found
    return None
