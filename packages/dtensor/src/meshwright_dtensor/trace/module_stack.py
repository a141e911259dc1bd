"""The stack of modules whose forward is running, with the planned targets of their calls.

Module hooks push and pop frames. The communication log reads the module names, the dispatcher the targets.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright_dtensor._torch.core import on_checkpointing
from meshwright_dtensor.trace.graph import function_name

Targets = Mapping[str, Mapping[int, Any]]
"""Function name -> occurrence of the call in the forward -> its target (see dispatch.planned_calls)."""

ByForward = Mapping[int | None, Targets]
"""Number of a forward of a module, where a plan tells those in one forward of the model apart -> targets; None: of all others."""


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

    def recall(self, func: Callable[..., Any]) -> None:
        """The call that `target` has counted last will ask for its target again."""
        name = function_name(func)
        if name in self.rules:
            self.counts[name] -= 1

    def copy(self) -> Frame:
        """The same frame with its own counts."""
        return replace(self, counts=self.counts.copy())


class Frames(threading.local):
    """The running modules of this thread, innermost last.

    Attributes:
        with_rules: whether a model of this process has had frames with targets, in any thread.
    """

    with_rules: ClassVar[bool] = False

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.begun: Counter[str] | None = None
        """Module whose forwards a plan tells apart -> how many have begun in this forward of the model; None outside of one."""
        self.outer: list[Counter[str] | None] = []
        """The same of forwards of models around it."""

    def current(self) -> Frame | None:
        """The innermost running module that has a frame."""
        return self.stack[-1] if self.stack else None

    def begin(self, module: str) -> int | None:
        """The number of the forward of a module that begins now, within the running forward of the model; None outside of one."""
        if self.begun is None:
            return None
        self.begun[module] += 1
        return self.begun[module] - 1

    def numbers(self, modules: Sequence[str]) -> tuple[int, ...] | None:
        """The numbers of their next forwards; None outside of a forward of the model, and for no modules."""
        return (
            None if self.begun is None or not modules else tuple([self.begun[module] for module in modules])
        )

    def set_numbers(self, modules: Sequence[str], numbers: tuple[int, ...] | None) -> None:
        """Set what `numbers` returns."""
        if self.begun is not None and numbers is not None:
            for module, number in zip(modules, numbers, strict=True):
                self.begun[module] = number

    @contextlib.contextmanager
    def replaced(self, stack: list[Frame], begun: Counter[str] | None) -> Iterator[None]:
        """Inside, these are the running modules and the counts of forwards."""
        before = self.stack, self.begun
        self.stack, self.begun = stack, begun
        try:
            yield
        finally:
            self.stack, self.begun = before


FRAMES = Frames()
"""Torch functions carry no context, so the running modules are kept per thread."""

_NAME, _TARGETS = "_meshwright_name", "_meshwright_targets"


def with_current_frames(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the present stack, whenever it runs.

    A model's own checkpointing runs a part of a forward again without the hooks of the modules around it.
    """
    frames, begun = [frame.copy() for frame in FRAMES.stack], copy(FRAMES.begun)
    if not frames and begun is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with FRAMES.replaced([frame.copy() for frame in frames], copy(begun)):
            return function(*args, **kwargs)

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


def install_frames(model: nn.Module, rules: Mapping[str, ByForward]) -> list[Any]:
    """Hooks that push and pop a frame for every module in ``rules`` and for all modules inside of those.

    A call belongs to the innermost running module, so the modules inside need frames too.  The other modules get their
    names, for reports.

    Returns:
        Handles; ``handle.remove()`` undoes it.
    """
    handles: list[Any] = []
    inside: set[str] = set()
    framed: set[int] = set()
    # a module may be inside by another name than its first
    for name, module in model.named_modules(remove_duplicate=False):
        if name in rules or (name and ("" in rules or name.rpartition(".")[0] in inside)):
            inside.add(name)
            framed.add(id(module))
    for name, module in model.named_modules():
        if id(module) in framed:
            handles += _hook(module, name, rules.get(name, {}))
        else:
            module.__dict__[_NAME] = name
    if any(len(by_forward) > 1 for by_forward in rules.values()):
        handles += _count_forwards(model)
    if handles:
        on_checkpointing(with_current_frames)
    return handles


def targets_in(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """What a plan wants of the calls of these modules: equal and hashable where it wants the same."""
    tables = ((n, m.__dict__[_TARGETS][1]) for n, m in enumerate(modules) if _TARGETS in m.__dict__)
    return tuple(
        (n, forward, function, occurrence, target)
        for n, by_forward in tables
        for forward, targets in by_forward.items()
        for function, planned in targets.items()
        for occurrence, target in planned.items()
    )


def counted_in(modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """The names of those of these modules whose forwards a plan tells apart."""
    entries = (m.__dict__[_TARGETS] for m in modules if _TARGETS in m.__dict__)
    return tuple(name for name, by_forward in entries if len(by_forward) > 1)


def _count_forwards(model: nn.Module) -> list[Any]:
    """Hooks that count the forwards of modules anew in each forward of `model`."""
    frames = FRAMES

    def enter(_module: nn.Module, _args: Any) -> None:
        frames.outer.append(frames.begun)
        frames.begun = Counter()

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        frames.begun = frames.outer.pop() if frames.outer else None

    return [
        model.register_forward_pre_hook(enter, prepend=True),
        model.register_forward_hook(leave, always_call=True),
    ]


def _hook(module: nn.Module, name: str, by_forward: ByForward) -> list[Any]:
    frames, shown = FRAMES, _shown_name(module, name)
    module.__dict__[_TARGETS] = name, by_forward
    rules, counted = by_forward.get(None, {}), len(by_forward) > 1
    # one without targets counts nothing
    bare = None if any(by_forward.values()) else Frame(name, rules, shown)
    if bare is None:
        Frames.with_rules = True

    def enter(_module: nn.Module, _args: Any) -> None:
        if bare is not None:
            frames.stack.append(bare)
            return
        here = by_forward.get(frames.begin(name), rules) if counted else rules
        frames.stack.append(Frame(name, here, shown))

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if frames.stack:
            frames.stack.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _shown_name(module: nn.Module, name: str) -> str:
    return name or f"({type(module).__name__})"
