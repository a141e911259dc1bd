"""Finds the forward hook that raised an error, to name it to the user."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from meshwright_pipeline._torch import hooks_of, pre_hooks_of


def hook_in(model: nn.Module, error: BaseException) -> str:
    """Describes the hook of a module of `model` that was running when `error` was raised; "" if none was."""
    codes = {
        code: f"{kind} {getattr(hook, '__name__', type(hook).__name__)!r} of module {name!r}"
        for name, module in model.named_modules()
        for kind, hooks in (("hook", hooks_of(module)), ("pre-hook", pre_hooks_of(module)))
        for hook in hooks.values()
        if (code := _code(hook)) is not None
    }
    return next((codes[code] for code in _running(error) if code in codes), "") if codes else ""


def _running(error: BaseException) -> Iterator[CodeType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next


def _code(hook: Callable[..., Any]) -> CodeType | None:
    """The code of a hook: of a function, a method, a partial of one, or a callable object."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    for function in (hook, inspect.getattr_static(type(hook), "__call__", None)):
        code = getattr(function, "__code__", None) or getattr(
            getattr(function, "__func__", None), "__code__", None
        )
        if isinstance(code, CodeType):
            return code
    return None
