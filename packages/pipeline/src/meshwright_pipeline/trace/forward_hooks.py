"""Takes over the calls of chosen modules of a model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
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


_State = tuple[Handler | None, dict[str, int], bool]
"""Of a forward: what takes over the calls of units, unit -> how many of them have begun, whether one runs."""


class _Handled:
    """See `UnitCalls.handled`. Around every forward of a step, where a generator costs more than its content."""

    __slots__ = ("calls", "outer", "replaced", "state")

    def __init__(
        self, calls: UnitCalls, handler: Handler, replaced: contextlib.AbstractContextManager[None] | None
    ) -> None:
        self.calls, self.replaced = calls, replaced
        self.state: _State = (handler, {}, False)
        self.outer: _State = self.state

    def __enter__(self) -> None:
        if self.replaced is not None:
            self.replaced.__enter__()
        self.outer = self.calls.take(self.state)

    def __exit__(self, *error: Any) -> None:
        self.calls.take(self.outer)
        if self.replaced is not None:
            self.replaced.__exit__(*error)


class UnitCalls:
    """Takes over the calls of some modules of a model, its units: a handler runs instead, and hooks still run around it.

    It is given `((unit, call), original forward, args, kwargs)`. A unit that another unit calls is a part of that call.
    Forwards are replaced once for all forwards of the model in a step.
    """

    def __init__(self, units: Iterable[str]) -> None:
        self.units = tuple(units)
        self._replaced = False
        self._handler: Handler | None = None
        self._counts: dict[str, int] = {}
        self._inside = False

    @contextlib.contextmanager
    def replaced(self, model: nn.Module) -> Iterator[None]:
        """Inside, the units of `model` have other forwards; outside of `handled` these call the original ones."""
        if self._replaced:
            yield
            return
        modules = [(unit, model.get_submodule(unit)) for unit in self.units]
        before = [(module, module.__dict__.get("forward")) for _, module in modules]
        self._replaced = True
        try:
            for unit, module in modules:
                module.__dict__["forward"] = self._replacement(unit, module.forward)
            yield
        finally:
            self._replaced = False
            for module, forward in reversed(before):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward

    def handled(self, model: nn.Module, handler: Handler) -> contextlib.AbstractContextManager[None]:
        """Inside, where one forward of `model` runs, `handler` takes over the calls of units."""
        return _Handled(self, handler, None if self._replaced else self.replaced(model))

    def take(self, state: _State) -> _State:
        """Let another forward of the model run, or go back to one; returns the state of the one that ran."""
        before = self._handler, self._counts, self._inside
        self._handler, self._counts, self._inside = state
        return before

    def _replacement(self, unit: str, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            handler = self._handler
            if handler is None or self._inside:
                return forward(*args, **kwargs)
            _refuse_inside_function(unit)
            key = unit, self._counts.get(unit, 0)
            self._counts[unit] = key[1] + 1
            self._inside = True
            try:
                return handler(key, forward, args, kwargs)
            finally:
                self._inside = False

        # some models inspect the parameters of forward
        signature = signature_of(forward)
        if signature is not None:
            run.__signature__ = signature  # type: ignore[attr-defined]
        return run
