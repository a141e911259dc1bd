"""A compiled region: calls of one module that run as a compiled graph, or as they are, with the reason.

The first call of a kind runs as it is and is followed: what its Python reads is watched from then on. The second shows that
the call changes nothing that it reads. The third is compiled. So a shape that comes once or twice costs no compilation, and
code with side effects is not compiled at all.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from meshwright_dtensor._torch.core import any_autocast
from meshwright_dtensor._torch.modes import functorch_active
from meshwright_dtensor.comm.log import CommLog
from meshwright_dtensor.devices import autocast_types
from meshwright_dtensor.trace.module_stack import FRAMES, targets_in
from meshwright_parallel._torch.checkpoint import notes_of_checkpoint
from meshwright_parallel._torch.compiler import Backend, function_mode_is_on, global_hooks, modes_are_on
from meshwright_parallel._torch.core import BUFFERS, PARAMETERS, module_parts, storage_key
from meshwright_parallel.compile.cache_arguments import EARLIER, contents, filled, go_on
from meshwright_parallel.compile.call_values import CannotKey, key_of, local_parts
from meshwright_parallel.compile.compiled_graphs import CompiledGraphs
from meshwright_parallel.compile.program import (
    CannotCompile,
    RegionProgram,
    compile_call,
    recorded_draws,
    slots_of,
)
from meshwright_parallel.compile.python_reads import recorded_reads
from meshwright_parallel.compile.region_parts import RegionParts
from meshwright_parallel.compile.watches import CannotWatch, Watches

MAX_PROGRAMS = 8
"""Compilations of a kind of region: further shapes run as they are."""
TOO_MANY = f"calls of more forms than {MAX_PROGRAMS} compilations are for; pad the batches to fewer shapes"
FUNCTION_MODE = "a default device is set by torch.set_default_device, or another function mode is on"
MAX_FOLLOWED = 64
"""Calls of a kind of region, or of one region with caches, that are followed: further ones run as they are."""
SLOW_SECONDS = 60.0
SLOW = "region %s: torch's compiler has worked on one graph for %g s; if it does not end, leave the module out of compile="

_log = logging.getLogger("meshwright")


@dataclass(eq=False)
class Entry:
    """Calls that one graph can run.

    Attributes:
        watches: what they depend on, but for their tensors.
        draws: the random numbers that they take.
        numbers: of the next forwards of modules inside, after such a call (Frames.numbers).
        program: compiled at the third call.
        refused: why they run as they are.
        confirmed: a second call has changed nothing.
    """

    watches: Watches
    draws: list[Any]
    numbers: tuple[int, ...] | None = None
    program: RegionProgram | None = None
    refused: str | None = None
    confirmed: bool = False

    def refuse(self, reason: str) -> None:
        """Let these calls run as they are."""
        self.refused, self.watches, self.draws = reason, Watches(), []


@dataclass(eq=False)
class Kind:
    """What regions of one structure share.

    Attributes:
        name: of the class of their modules.
        lacks: why nothing can be compiled here.
        entries: key of a call -> entries, by what their Python reads.
        reasons: why calls run as they are -> how many have.
        graphs: compiled for them. failed: why calls could not be, one each. runs: calls that ran compiled. others: as they are.
    """

    name: str
    backend: Backend
    lacks: str | None = None
    entries: dict[Any, list[Entry]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    graphs: CompiledGraphs = field(
        default_factory=lambda: CompiledGraphs(MAX_PROGRAMS, lambda: CannotCompile(TOO_MANY))
    )
    failed: list[str] = field(default_factory=list)
    followed: int = 0
    runs: int = 0
    others: int = 0

    @property
    def compiled(self) -> int:
        """Compilations that were tried."""
        return self.graphs.count + len(self.failed)

    def copy(self) -> Kind:
        """The kind of copies of the modules, of which nothing has run."""
        return Kind(self.name, self.backend, self.lacks)

    def refuse(self, reason: str) -> None:
        """Count a call that runs as it is; a new reason is logged."""
        self.others += 1
        if reason not in self.reasons:
            _log.info("region %s is not compiled: %s", self.name, reason)
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class _Inside(threading.local):
    """Whether a region is running in this thread: a region in it is a part of its graph."""

    running = False


_INSIDE = _Inside()
_AS_IT_IS, _IN_PARTS = "as it is", "in parts"


class Region:
    """The forward of a module, compiled where it can be.

    Args:
        inner: the forward as it is.
        parts: the regions of modules inside, which take over where this one cannot be compiled.
    """

    is_region = True

    def __init__(
        self, module: nn.Module, inner: Callable[..., Any], kind: Kind, parts: Sequence[Region]
    ) -> None:
        self.module, self.kind, self.parts = module, kind, list(parts)
        # the forward of its class is looked up in every call: it may be replaced there
        self._replaced = None if getattr(inner, "__func__", None) is type(module).forward else inner
        # some models inspect the parameters of forward
        self.__signature__ = inspect.signature(inner)
        self.active = False
        self._followed, self._filled = 0, set[int]()
        self._read: RegionParts | None = None

    @property
    def inner(self) -> Callable[..., Any]:
        """The forward as it is."""
        return self._replaced or MethodType(type(self.module).forward, self.module)

    @property
    def _parts(self) -> RegionParts:
        # not before the model is complete
        if self._read is None:
            self._read = RegionParts(self.module)
        return self._read

    @property
    def modules(self) -> list[nn.Module]:
        """The module and all inside of it."""
        return self._parts.modules

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copied = Region.__new__(Region)
        memo[id(self)] = copied
        copied.__init__(  # type: ignore[misc]
            copy.deepcopy(self.module, memo),
            copy.deepcopy(self.inner, memo),
            self.kind.copy(),
            copy.deepcopy(self.parts, memo),
        )
        copied.active = self.active
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's forward."""
        if not self.active or _INSIDE.running:
            return self.inner(*args, **kwargs)
        if self.kind.lacks is not None:
            self.kind.refuse(self.kind.lacks)
            return self.inner(*args, **kwargs)
        checkpoint = notes_of_checkpoint()
        if checkpoint is None:
            return self._run(args, kwargs)[0]
        notes, again = checkpoint
        if again is not None:
            return self._run_again(notes.get(self, []), again, args, kwargs)
        place = len(notes.setdefault(self, []))
        notes[self].append(_IN_PARTS)
        result, notes[self][place] = self._run(args, kwargs)
        return result

    def _run_again(
        self, notes: list[Any], again: Counter[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a checkpointed region for the second time: it saves the same tensors only if it runs in the same way."""
        place = again[self]
        again[self] += 1
        way: Any = notes[place] if place < len(notes) else _AS_IT_IS
        if way is _AS_IT_IS:
            return self._as_it_is(args, kwargs)
        if way is _IN_PARTS:
            return self.inner(*args, **kwargs)
        tensors, caches = list[Any](), list[Any]()
        key_of((args, kwargs), tensors, caches)
        return way(self.modules, tensors, caches)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The result, and the way in which it was computed: the program, `_AS_IT_IS` or `_IN_PARTS`."""
        tensors, caches = list[Any](), list[Any]()
        try:
            key = self._key(args, kwargs, tensors, caches)
        except CannotKey as error:
            return self._in_parts(str(error), args, kwargs), _IN_PARTS
        if caches and go_on(caches, self._filled):
            # every length would be a call of another form
            return self._in_parts(EARLIER, args, kwargs), _IN_PARTS
        if key is None:
            if function_mode_is_on():
                # of all calls of a loop, perhaps
                self.kind.refuse(FUNCTION_MODE)
            else:
                self.kind.others += 1
            return self.inner(*args, **kwargs), _IN_PARTS
        entry = self._entry(key)
        if entry is None:
            kind = self.kind
            # a layer has calls of its own, for its number and the layers of the cache before it
            followed = self._followed if caches else kind.followed
            if followed >= MAX_FOLLOWED or kind.compiled >= MAX_PROGRAMS:
                # parts would be compiled for as many shapes
                kind.refuse(TOO_MANY)
                return self._as_it_is(args, kwargs), _AS_IT_IS
            self._followed += bool(caches)
            kind.followed += not caches
            before = contents(caches)
            result = self._follow(key, args, kwargs)
            self._filled |= filled(before, contents(caches))
            return result, _AS_IT_IS
        if entry.refused is None and not entry.confirmed:
            return self._confirm(entry, args, kwargs), _AS_IT_IS
        if entry.refused is None and entry.program is None:
            self._compile(entry, args, kwargs, tensors, caches)
        if entry.refused is not None:
            return self._in_parts(entry.refused, args, kwargs), _IN_PARTS
        assert entry.program is not None
        self.kind.runs += 1
        result = entry.program(self.modules, tensors, caches)
        FRAMES.set_numbers(self._parts.counted, entry.numbers)
        return result, entry.program

    def _key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any], caches: list[Any]
    ) -> Any:
        """The key of a call; None where a mode or hook of the caller has to see what runs. Raises CannotKey."""
        if CommLog.listening() or modes_are_on() or functorch_active() or global_hooks():
            return None
        if torch.is_inference_mode_enabled():
            return None
        call = key_of(args, tensors, caches)
        if kwargs:
            call = (call, key_of(kwargs, tensors, caches))
        # a graph that writes to an argument is that of arguments which share memory in the same way
        stored = self._parts.forms()
        memory = [storage_key(t) for t in [*local_parts(tensors), *self._parts.buffers()]]
        ids = [id(t) for t in tensors]
        distinct = len(set(memory)) == len(memory)
        same = None if distinct else (*map(memory.index, memory), *map(ids.index, ids))
        of_caches = [id(cache) for cache in caches]
        same_caches = tuple(map(of_caches.index, of_caches))
        casts = None
        if any_autocast():
            casts = tuple([(d, torch.get_autocast_dtype(d)) for d in autocast_types()])
        settings = (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )
        return (call, same, same_caches, casts, settings, stored, FRAMES.numbers(self._parts.counted))

    def _entry(self, key: Any) -> Entry | None:
        for entry in self.kind.entries.get(key, ()):
            if entry.watches.changed(self.modules) is None:
                return entry
        return None

    def _in_parts(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call as it is, with compiled parts."""
        self.kind.refuse(reason)
        for part in self.parts:
            part.active = True
        return self.inner(*args, **kwargs)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call as it is, parts too."""
        _INSIDE.running = True
        try:
            return self.inner(*args, **kwargs)
        finally:
            _INSIDE.running = False

    def _follow(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a new kind, and watch its reads."""
        kind = self.kind
        kind.others += 1
        before = {id(m): dict(vars(m)) for m in self.modules}
        with recorded_draws() as draws, recorded_reads() as reads:
            result = self._as_it_is(args, kwargs)
        refused = reads.refusals[0] if reads.refusals else _changed(self.modules, before)
        watches = Watches()
        if refused is None:
            try:
                watches = Watches.of(self.modules, reads)
            except CannotWatch as error:
                refused = str(error)
        numbers = FRAMES.numbers(self._parts.counted)
        entry = Entry(watches, [] if refused else draws, numbers, refused=refused)
        kind.entries.setdefault(key, []).append(entry)
        return result

    def _confirm(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the second time: its reads may not change."""
        self.kind.others += 1
        result = self._as_it_is(args, kwargs)
        entry.confirmed = True
        changed = entry.watches.changed(self.modules)
        if changed is not None:
            entry.refuse(f"it changes {changed}, which it reads")
        return result

    def _compile(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Any],
        caches: list[Any],
    ) -> None:
        """Compile a call, or say why it cannot be. Other ranks may decide otherwise: the collectives are the same."""
        kind = self.kind
        if len(kind.failed) >= MAX_PROGRAMS:
            # a call of each layer, say
            entry.refuse(kind.failed[-1])
            return
        _INSIDE.running = True
        slow = threading.Timer(SLOW_SECONDS, _log.warning, (SLOW, kind.name, SLOW_SECONDS))
        slow.daemon = True
        slow.start()
        try:
            entry.program = compile_call(
                self.modules,
                self.inner,
                args,
                kwargs,
                tensors,
                caches,
                entry.draws,
                kind.backend,
                kind.graphs,
            )
            entry.draws = []
        except CannotCompile as error:
            if str(error) != TOO_MANY:
                kind.failed.append(str(error))
            entry.refuse(str(error))
        finally:
            slow.cancel()
            _INSIDE.running = False


def _changed(modules: Sequence[nn.Module], before: dict[int, dict[str, Any]]) -> str | None:
    """An attribute of a module that a call has assigned."""
    for module in modules:
        old, new = before[id(module)], vars(module)
        for name in new.keys() | old.keys():
            if new.get(name) is not old.get(name):
                return f"it assigns {type(module).__name__}.{name}"
    return None


def kind_key(module: nn.Module) -> Any:
    """Equal for modules of one structure: classes, parameters, buffers, and what a plan wants of their calls."""
    modules = list(module.modules())
    parts = []
    for part in (PARAMETERS, BUFFERS):
        for number, name in slots_of(modules, part):
            value: Any = module_parts(modules[number])[part][name]
            form = getattr(value, "compute_layout", None) or tuple(value.shape)
            parts.append((number, name, form, value.dtype, value.device))
    classes = tuple((name, type(m)) for name, m in module.named_modules())
    return classes, tuple(parts), targets_in(modules)
