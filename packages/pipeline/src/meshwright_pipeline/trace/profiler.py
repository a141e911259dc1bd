"""One watched run of a skeleton: which units run in which order, and which of their results later ones depend on.

Units run on the meta device and return labelled zeros; the code between them runs as it is. A label (unit, call, path)
follows a value through every operation below autograd ("taint"), so that what a later unit, or the result, consumes of
earlier units is known exactly. That is what has to cross a cut.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import (
    TorchDispatchMode,
    WeakTensorKeys,
    draws,
    forward_hooks,
    hooks_of,
    op_name,
    pytree,
    target_of,
)
from meshwright_pipeline.pytrees import (
    attribute_tensors,
    expanded_zeros,
    is_expanded,
    leaves_of,
    map_leaves,
    tensors_of,
)
from meshwright_pipeline.trace.forward_hooks import Calls, Key, Label, intercepted
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.meta_model import back_on_meta, put_expanded_zeros, unit_tensors, with_zeros
from meshwright_pipeline.trace.microbatch import Call, rows_of
from meshwright_pipeline.trace.rng_replay import BETWEEN, Draw, DrawRecorder, check_generator
from meshwright_pipeline.trace.row_tracer import RowTracer, TracedFunctions
from meshwright_pipeline.trace.side_outputs import (
    attribute_leaves,
    check_grown,
    check_sendable,
    is_attribute,
    new_side_outputs,
    part_of,
)
from meshwright_pipeline.trace.state_writes import StateWrites, WrittenState

Labels = frozenset[Label]
NOTHING: Labels = frozenset()
NOTHING_KEPT = WrittenState()
READ = -1
"""The call of a label that stands for the parameters of a unit."""
_MISSING = object()
_BATCH: Label = ("", READ - 1, "", 0)
"""Stands for the rows of the batch."""

_NO_GRADIENT = "does not require grad"
"""What autograd says of a value that it has not followed."""
_DIFFERENTIATES = (
    "forward of this {} differentiates (torch.autograd.grad or backward, as a gradient penalty does): in a pipeline gradients are "
    "there when all stages have run, and not inside of forward; differentiate behind the call of the model, or plan without pp"
)

# results that take nothing but the shape of their input
_SHAPE_ONLY = frozenset(
    "empty_like zeros_like ones_like full_like new_zeros new_ones new_empty new_full rand_like randn_like".split()
)


@dataclass(frozen=True)
class Result:
    """What a call of a unit returned: its tree, with zeros; by path what hooks inside of it saw of its parts, and by place what
    it left in attributes (see leaving), of which some have only `grown`.
    """

    output: Any
    side: dict[str, Any] = field(default_factory=dict)
    grown: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Profile:
    """One watched run.

    Attributes:
        order: (unit, call) as they ran.
        consumes: (unit, call) -> the labels that its arguments depend on.
        final: the labels that the result of the model depends on, or a buffer outside of units that is written.
        results: (unit, call) -> what it returned, as zeros without memory.
        output: what the model returned; its tensors mean nothing.
        read: units whose parameters code between units computes with.
        draws: the random operations, in order.
        of_batch: the calls whose results depend on the rows of the batch.
        written: what code between units writes to, of what units return.
        kept: the buffers and numbers outside of units that it writes to.
    """

    order: tuple[Key, ...]
    consumes: dict[Key, Labels]
    final: Labels
    results: dict[Key, Result]
    output: Any
    read: tuple[str, ...]
    draws: tuple[Draw, ...] = ()
    of_batch: frozenset[Key] = frozenset()
    written: Labels = NOTHING
    kept: WrittenState = NOTHING_KEPT

    @cached_property
    def attributes(self) -> frozenset[tuple[str, int, str]]:
        """(unit, call, place) of the attributes that code between units takes."""
        taken = self.final.union(*self.consumes.values())
        return frozenset(label[:3] for label in taken if is_attribute(label[2]))

    def leaf(self, label: Label) -> Any:
        """The leaf of a result that a label stands for."""
        unit, call, path, place = label
        result = self.results[unit, call]
        return leaves_of(result.side[path] if path else result.output)[place]


class _Taint(TorchDispatchMode):
    """Labels follow values; inside units nothing is followed."""

    def __init__(self, watch: RowTracer | None) -> None:
        super().__init__()
        self.watch = watch
        self.labels = WeakTensorKeys()
        self.inside = 0
        self.key = BETWEEN
        self.draws = DrawRecorder()
        self.written: set[Label] = set()
        self._returned: dict[int, tuple[torch.Tensor, Label]] = {}

    def returned(self, value: torch.Tensor, label: Label) -> None:
        """A unit has returned this."""
        self.labels[value] = frozenset({label})
        self._returned[value.untyped_storage().data_ptr()] = (
            value,
            label,
        )  # kept, so that the memory stays its own

    def of(self, tree: Any) -> Labels:
        found = NOTHING
        for tensor in tensors_of(tree):
            found |= self.labels.get(tensor, NOTHING)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            check_generator(self.key, func, kwargs)
        if self.watch is None or self.inside:
            result = self._run(func, args, kwargs)
        else:
            result = self.watch.run(func, args, kwargs)
        if draws(func, args, kwargs):
            self.draws.note(self.key, func, args, kwargs, result)
        if not self.inside:
            found = self.of((args, kwargs))
            if found and op_name(func) not in _SHAPE_ONLY:
                for tensor in tensors_of(result):
                    self.labels[tensor] = self.labels.get(tensor, NOTHING) | found
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation; one that writes to a stand-in without memory changes nothing."""
        target = None if self.inside else target_of(func, args, kwargs)
        if target is None or target.is_meta:
            return func(*args, **kwargs)
        _, label = self._returned.get(target.untyped_storage().data_ptr(), (None, None))
        if label is not None:
            self.written.add(label)
        return target if is_expanded(target) else func(*args, **kwargs)


class Profiler:
    """Runs a skeleton under watch.

    Args:
        model: the skeleton.
        units: names of its units.
    """

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        self.model, self.units = model, units
        self.reads = False
        self._no_meta: set[Hashable] = set()  # what does not run on the meta device

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: RowTracer | None = None) -> Profile:
        """Profile one call with these arguments; no random number is consumed. `watch`: looks at the code between units.

        Raises:
            UnsupportedError: the model cannot be run with its units skipped.
        """
        device = next((t.device for t in tensors_of((args, kwargs))), torch.device("cpu"))
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._run(args, kwargs, device, watch)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                if self.reads or watch is not None:
                    raise
            # code between units computes with the parameters of some: they become zeros
            self.reads = True
            for unit in self.units:
                put_expanded_zeros(self.model.get_submodule(unit), device)
            try:
                return self._run(args, kwargs, device, watch)
            except RuntimeError as error:
                if _NO_GRADIENT in str(error):
                    raise UnsupportedError(_DIFFERENTIATES.format(type(self.model).__name__)) from error
                raise

    def shape(
        self, unit: str, forward: Calls, call: Call, device: torch.device, drawn: DrawRecorder
    ) -> Result:
        """What a call of a unit returns, with zeros; `drawn`: where its random operations are noted."""
        module, kind = self.model.get_submodule(unit), self.kind(unit)
        if kind in self._no_meta:
            return _shape_run(unit, module, forward, call, device, drawn, numbers=True)
        before, unchanged = drawn.mark(), snapshot(*call)
        try:
            return _shape_run(unit, module, forward, call, device, drawn)
        except Exception:  # no meta kernel, a look at values: any error says to try with numbers
            drawn.back_to(before)
        result = _shape_run(unit, module, forward, unchanged, device, drawn, numbers=True)
        self._no_meta.add(kind)
        return result

    def kind(self, unit: str) -> Hashable:
        """The same for units that are built alike."""
        return unit

    def value(self, label: Label, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """What code between units is given of a result: zeros without memory."""
        return expanded_zeros(like, device)

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, watch: RowTracer | None
    ) -> Profile:
        taint = _Taint(watch)
        order: list[Key] = []
        consumes: dict[Key, Labels] = {}
        results: dict[Key, Result] = {}
        of_batch: set[Key] = set()
        kept: list[tuple[nn.Module, str, Any]] = []  # attributes of units, as they were
        rows = rows_of(args, kwargs)
        for tensor in tensors_of((args, kwargs)):
            if tensor.dim() and tensor.shape[0] == rows:
                taint.labels[tensor] = frozenset({_BATCH})
                if watch is not None:
                    watch.seed(tensor, 0, live=False)

        def one(key: Key, forward: Callable[..., Any], a: tuple[Any, ...], k: dict[str, Any]) -> Any:
            order.append(key)
            # what is in an object counts too: a stage that has it may look there
            held = [tensor for leaf in leaves_of((a, k)) for tensor in attribute_tensors(leaf)]
            found = taint.of((a, k, held))
            consumes[key] = found - {_BATCH}
            if _BATCH in found or any(label[:2] in of_batch for label in found):
                of_batch.add(key)
            taint.inside, taint.key = taint.inside + 1, key
            try:
                with glue.paused() if isinstance(glue, TracedFunctions) else glue:
                    result = self.shape(key[0], forward, (a, k), device, taint.draws)
            finally:
                taint.inside, taint.key = taint.inside - 1, BETWEEN
            results[key] = result

            def labelled(path: str) -> Callable[[int, torch.Tensor], torch.Tensor]:
                def mark(index: int, like: torch.Tensor) -> torch.Tensor:
                    label = (*key, path, index)
                    value = self.value(label, like, device)
                    taint.returned(value, label)
                    if watch is not None:
                        watch.returned(value, label)
                    return value

                return mark

            unit = self.model.get_submodule(key[0])
            for path, value in result.side.items():
                if is_attribute(path):
                    part, name = part_of(unit, path)
                    kept.append((part, name, part.__dict__.get(name, _MISSING)))
                    part.__dict__[name] = map_leaves(labelled(path), value)
                    continue
                call_hooks(
                    unit.get_submodule(path),
                    hooks_of(unit.get_submodule(path)),
                    map_leaves(labelled(path), value),
                )
            return map_leaves(labelled(""), result.output)

        if self.reads:
            for unit in self.units:
                for tensor in unit_tensors(self.model.get_submodule(unit)):
                    taint.labels[tensor] = frozenset({(unit, READ, "", 0)})
        writes = StateWrites(self.model, self.units)
        glue = contextlib.nullcontext() if watch is None else TracedFunctions(watch)
        try:
            with intercepted(self.model, self.units, one), glue, taint:
                output = self.model(*args, **kwargs)
        finally:
            for part, name, value in reversed(kept):
                part.__dict__.pop(name, None)
                if value is not _MISSING:
                    part.__dict__[name] = value
        # one that is made once, and of no batch, each rank makes itself
        buffers = {at: b for at, b in writes.buffers().items() if at not in writes.empty or taint.of([b])}
        # the loss may be in an object that is no tree of tensors
        final = taint.of((output, loss_of(output), list(buffers.values()))) - {_BATCH}
        check_grown({key: result.grown for key, result in results.items()}, final.union(*consumes.values()))
        read = {unit for labels in (*consumes.values(), final) for unit, call, _, _ in labels if call == READ}
        if not order:
            raise UnsupportedError(
                f"no module of this {type(self.model).__name__} that could be given to a stage was called; "
                "a pipeline needs modules that are called through module(...)"
            )
        return Profile(
            tuple(order),
            consumes,
            final,
            results,
            output,
            tuple(sorted(read)),
            tuple(taint.draws.found),
            frozenset(of_batch),
            frozenset(taint.written),
            WrittenState(tuple(buffers), writes.numbers()),
        )


def call_hooks(module: nn.Module, hooks: Any, output: Any) -> None:
    """Let forward hooks see an output that the module did not make."""
    for hook in list(hooks.values()):
        hook(module, (), output)


def _shape_run(
    name: str,
    unit: nn.Module,
    forward: Calls,
    call: Call,
    device: torch.device,
    drawn: DrawRecorder,
    numbers: bool = False,
) -> Result:
    """Run a unit for its shapes only: on the meta device, or with zeros for `numbers`."""
    seen: dict[str, Any] = {}
    watched = [(path, part) for path, part in unit.named_modules() if path and hooks_of(part)]

    def watch(path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _args, output: seen.__setitem__(path, output)

    def given(_: int, tensor: torch.Tensor) -> torch.Tensor:
        if numbers:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        return tensor.to("meta")

    with contextlib.ExitStack() as stack:
        stack.enter_context(back_on_meta(unit))
        for path, part in watched:
            stack.enter_context(forward_hooks(part, {-1: watch(path)}))
        if numbers:
            stack.enter_context(with_zeros(unit, device))
        args, kwargs = map_leaves(given, call)
        before = attribute_leaves(unit)
        output = forward(*args, **kwargs)
        check_sendable(name, output, (args, kwargs))
        found, grown = new_side_outputs(before, unit)
    side = {path: _zeros(value, device) for path, value in (seen | found).items()}
    return Result(_zeros(output, device), side, grown)


def snapshot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with copies of the objects that a run may change (a cache of keys, say)."""

    def one(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (torch.Tensor, nn.Module, bool, int, float, str)):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except Exception:  # whatever an object of the model does when it is copied: it is used as it is then
            return leaf

    copied: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(one, (args, kwargs))
    return copied


def _zeros(tree: Any, device: torch.device) -> Any:
    return map_leaves(lambda _, t: expanded_zeros(t, device), tree)
