"""Temporarily replaces the forward of chosen modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from meshwright_pipeline.trace.profile import Key
from meshwright_pipeline.trace.side_outputs import CannotBeCut

Forward = Callable[..., Any]
Handler = Callable[[Key, Forward, tuple[Any, ...], dict[str, Any]], Any]


def signature_of(forward: Forward) -> inspect.Signature | None:
    """The signature of a forward; None if it cannot be determined."""
    try:
        if inspect.ismethod(forward):
            # only functions of a class are cached: the cache keeps them alive, and others may hold much
            function = forward.__func__
            if getattr(type(forward.__self__), forward.__name__, None) is function:
                return _without_self(function)
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=1024)
def _without_self(function: Forward) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _refuse_inside_function(unit: str) -> None:
    """Raise CannotBeCut if a unit is called by the forward of a user's autograd.Function (a reversible layer).

    Its result has no graph there, so no gradient would reach an earlier stage; the Function's backward runs the unit again.
    """
    apply = torch.autograd.Function.__dict__["apply"].__func__.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is apply and frame.f_locals["cls"] is not CheckpointFunction:
            raise CannotBeCut(
                f"{frame.f_locals['cls'].__name__}, an autograd.Function, calls module {unit!r} in its forward, where its "
                "result has no gradient for earlier stages. Call the modules outside of it (most reversible layers have an "
                "option for that), or plan without pp"
            )
        frame = frame.f_back  # type: ignore[assignment]


@contextlib.contextmanager
def intercepted(model: nn.Module, units: Iterable[str], handler: Handler) -> Iterator[None]:
    """Inside, calls of units run `handler((unit, call), original forward, args, kwargs)` instead. Hooks still run around it.

    A unit that another unit calls is a part of that call.
    """
    counts: Counter[str] = Counter()
    running: list[str] = []
    before: list[tuple[nn.Module, Any]] = []

    def replacement(unit: str, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if running:
                return forward(*args, **kwargs)
            _refuse_inside_function(unit)
            key = (unit, counts[unit])
            counts[unit] += 1
            running.append(unit)
            try:
                return handler(key, forward, args, kwargs)
            finally:
                running.pop()

        # some models inspect the parameters of forward
        signature = signature_of(forward)
        if signature is not None:
            run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    for unit in units:
        module = model.get_submodule(unit)
        before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = replacement(unit, module.forward)
    try:
        yield
    finally:
        for module, forward in reversed(before):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
