"""The stack of modules whose forward is running, with the planned targets of their calls.

Module hooks push and pop frames. The communication log reads the module names, the dispatcher the targets.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright_dtensor._torch.core import on_checkpointing
from meshwright_dtensor.trace.graph import function_name

Targets = Mapping[str, Mapping[int, Any]]
"""Function name -> occurrence of the call in the forward -> its target (see dispatch.planned_calls)."""


@dataclass(slots=True, eq=False)
class Frame:
    """A module whose forward is running; ``where``: its name in reports."""

    module: str
    rules: Targets
    where: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def target(self, func: Callable[..., Any]) -> Any:
        """The target of the call that is about to be made, None without one; counts the call."""
        if not self.rules:
            return None
        name = function_name(func)
        planned = self.rules.get(name)
        if planned is None:
            return None
        occurrence = self.counts[name]
        self.counts[name] = occurrence + 1
        return planned.get(occurrence)

    def copy(self) -> Frame:
        """The same frame with its own counts."""
        return replace(self, counts=self.counts.copy())


class Frames(threading.local):
    """The running modules of this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []

    def current(self) -> Frame | None:
        """The innermost running module that has a frame."""
        return self.stack[-1] if self.stack else None


FRAMES = Frames()
"""Torch functions carry no context, so the running modules are kept per thread."""

_NAME = "_meshwright_name"


def with_current_frames(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the present stack, whenever it runs.

    A model's own checkpointing runs a part of a forward again without the hooks of the modules around it.
    """
    frames = [frame.copy() for frame in FRAMES.stack]
    if not frames:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        before, FRAMES.stack = FRAMES.stack, [frame.copy() for frame in frames]
        try:
            return function(*args, **kwargs)
        finally:
            FRAMES.stack = before

    return run


@contextlib.contextmanager
def named_modules_tracked() -> Iterator[None]:
    """Inside, every module of a parallel model pushes a frame, at a price per call: reports name the module."""

    def enter(module: nn.Module, _args: Any) -> None:
        name = module.__dict__.get(_NAME)
        if name is not None:
            FRAMES.stack.append(Frame(name, {}, _shown_name(module, name)))

    def leave(module: nn.Module, _args: Any, _output: Any) -> None:
        if _NAME in module.__dict__ and FRAMES.stack:
            FRAMES.stack.pop()

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True):
        yield


def install_frames(model: nn.Module, rules: Mapping[str, Targets]) -> list[Any]:
    """Hooks that push and pop a frame for every module in ``rules`` and for all modules inside of those.

    A call belongs to the innermost running module, so the modules inside need frames too.  The other modules get their
    names, for reports.

    Returns:
        Handles; ``handle.remove()`` undoes it.
    """
    handles: list[Any] = []
    inside: set[str] = set()
    for name, module in model.named_modules():
        if name in rules or (name and ("" in rules or name.rpartition(".")[0] in inside)):
            inside.add(name)
            handles += _hook(module, name, rules.get(name, {}))
        else:
            module.__dict__[_NAME] = name
    if handles:
        on_checkpointing(with_current_frames)
    return handles


def _hook(module: nn.Module, name: str, rules: Targets) -> list[Any]:
    frames, shown = FRAMES, _shown_name(module, name)
    # one without targets counts nothing
    bare = None if rules else Frame(name, rules, shown)

    def enter(_module: nn.Module, _args: Any) -> None:
        frames.stack.append(Frame(name, rules, shown) if bare is None else bare)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if frames.stack:
            frames.stack.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _shown_name(module: nn.Module, name: str) -> str:
    return name or f"({type(module).__name__})"
