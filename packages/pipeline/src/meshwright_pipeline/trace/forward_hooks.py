"""Take the place of the forward of chosen modules, for as long as a model runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

from torch import nn

Key = tuple[str, int]
"""(name of a unit, which of its calls in one forward)."""

Label = tuple[str, int, str, int]
"""A result of a unit: (unit, call, "" or the path of a part of it, index of the leaf)."""

Calls = Callable[..., Any]
Handler = Callable[[Key, Calls, tuple[Any, ...], dict[str, Any]], Any]


def signature_of(forward: Calls) -> inspect.Signature | None:
    """What a forward takes, None where that cannot be known."""
    try:
        if inspect.ismethod(forward) and _of_class(forward):
            return _without_self(forward.__func__)
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _of_class(method: MethodType) -> bool:
    """Whether it lives as long as a class does: a function that was bound to one module may hold whatever it likes."""
    return getattr(type(method.__self__), method.__name__, None) is method.__func__


@functools.lru_cache(maxsize=1024)
def _without_self(function: Calls) -> inspect.Signature:
    """Kept, since every microbatch asks for the same."""
    found = inspect.signature(function)
    return found.replace(parameters=list(found.parameters.values())[1:])


@contextlib.contextmanager
def intercepted(model: nn.Module, units: Iterable[str], handler: Handler) -> Iterator[None]:
    """Inside, a call of a unit runs `handler((unit, call), its own forward, args, kwargs)` in the place of its forward.

    Hooks of the module itself run around that as ever.
    """
    counts: Counter[str] = Counter()
    before: list[tuple[nn.Module, Any]] = []

    def stand_in(unit: str, forward: Calls) -> Calls:
        def run(*args: Any, **kwargs: Any) -> Any:
            key = (unit, counts[unit])
            counts[unit] += 1
            return handler(key, forward, args, kwargs)

        found = signature_of(forward)
        if found is not None:  # models look at the parameters of forward
            run.__signature__ = found  # type: ignore[attr-defined]
        return run

    for unit in units:
        module = model.get_submodule(unit)
        before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = stand_in(unit, module.forward)
    try:
        yield
    finally:
        for module, forward in reversed(before):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
