"""Temporarily replaces the forward of chosen modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from meshwright_pipeline.trace.profile import Key

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
