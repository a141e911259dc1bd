"""Runs a skeleton once to record which units run, and which unit results later units depend on.

Units run on the meta device and return labelled zeros. The code between units runs as it is. Labels propagate through
every operation below autograd, so the profile says exactly which unit results each later unit, and the result of the
model, depends on. These are the tensors that have to cross a stage boundary.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import MeshwrightError, UnsupportedError
from meshwright_dtensor.model.device import forked_random
from meshwright_dtensor.trace.one_device import on_one_device
from meshwright_pipeline import pytrees
from meshwright_pipeline._torch import hooks_of
from meshwright_pipeline.module_state import modules_around, tensors_held
from meshwright_pipeline.pytrees import (
    expanded_zeros,
    is_expanded,
    leaves_of,
    map_leaves,
    tensors_of,
    tensors_within,
)
from meshwright_pipeline.trace import side_outputs
from meshwright_pipeline.trace.explicit_draws import explicit_draws
from meshwright_pipeline.trace.forward_hooks import Forward, UnitCalls
from meshwright_pipeline.trace.label_mode import BATCH, LabelMode, ValueReads
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.meta_model import parameters_of, put_expanded_zeros, unit_tensors
from meshwright_pipeline.trace.microbatch import Call, rows_of, snapshot
from meshwright_pipeline.trace.profile import BETWEEN, PARAMETERS, Key, Label, Profile, Result
from meshwright_pipeline.trace.rng_replay import DrawLog
from meshwright_pipeline.trace.rows.tracer import RowTracer
from meshwright_pipeline.trace.state.carried_tensors import HeldTensors, LeftTensor
from meshwright_pipeline.trace.state.plain_attributes import (
    PlainAttributes,
    PlainReads,
    Read,
    check_outside,
    outside_of,
    shared_objects,
)
from meshwright_pipeline.trace.state.state_writes import StateWrites, WrittenState
from meshwright_pipeline.trace.unit_result import unit_result

_MISSING = object()
_NO_GRADIENT = "does not require grad"
"""Part of autograd's message for a tensor without a graph."""
_DIFFERENTIATES = (
    "forward of this {} calls torch.autograd.grad or backward (a gradient penalty, for example). In a pipeline, gradients exist "
    "only after all stages have run, not inside of forward. Differentiate after the call of the model, or plan without pp"
)

_READS = (
    "forward of this {} fails where zeros stand for the results of its modules ({}: {}). A pipeline runs it once in this way, to "
    "see which modules depend on which: do not read values of those results outside of the modules, or plan without pp"
)

_CHANCE = (
    "module {!r} runs or not by a random number (LayerDrop, say). In a pipeline the same modules run in every step: set that "
    "probability to 0, or plan without pp"
)
_REPLACES = (
    "module {!r} replaces modules in it while it runs, and a pipeline has those for which it was planned: call the model once on "
    "one device before it is planned, set the option that is the cause, or plan without pp"
)


class Profiler:
    """Profiles runs of a skeleton with these units. `settled`: random numbers are known not to decide which of them run."""

    def __init__(self, model: nn.Module, units: tuple[str, ...], settled: bool = False) -> None:
        self.model, self.units = model, units
        self.reads = False
        self.settled = settled
        self._no_meta: set[Hashable] = set()
        """Kinds of units that do not run on the meta device."""
        self.around = modules_around(model, units)
        self.shared = shared_objects(model, units)
        self._left: tuple[LeftTensor, ...] | None = None
        """What the first run has left in modules outside of units; () once a second one was seen not to read it."""
        self.stored: list[tuple[PlainAttributes, Iterable[str]]] = []
        """What the units of a run have stored in attributes; put back after it."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tracer: RowTracer | None = None) -> Profile:
        """Profile one call. No random number is consumed. `tracer` follows the rows of the batch between units.

        Raises UnsupportedError: the model cannot be run with its units skipped.
        """
        device = next((t.device for t in tensors_of((args, kwargs))), HOST)
        with (
            forked_random(device),
            torch.no_grad(),
            explicit_draws(device),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                return self._settled((args, kwargs), device, tracer)
            except MeshwrightError:
                raise
            except Exception as error:
                if tracer is not None:
                    raise
                if self.reads:
                    raise self._refusal(error) from error
            # code between units may use parameters of units: run again with zeros in their place
            self.reads = True
            for unit in self.units:
                put_expanded_zeros(self.model.get_submodule(unit), device)
            try:
                return self._settled((args, kwargs), device, tracer)
            except MeshwrightError:
                raise
            except Exception as error:
                raise self._refusal(error) from error

    def _settled(self, call: Call, device: torch.device, tracer: RowTracer | None) -> Profile:
        """Run once; and, where code between units draws single numbers, with the least and the largest ones.

        Raises CannotBeCut: which modules run depends on them.
        """
        profile = self._run(call, device, tracer)
        single = [
            d for d in profile.draws if d.key == BETWEEN and d.dtype.is_floating_point and not any(d.shape)
        ]
        for chance in () if self.settled or not single else (0.0, 1 - 2**-24):
            try:
                order = _ProfiledRun(self, device, None, chance).run(*call).order
            except UnsupportedError:
                # without any module
                order = ()
            changed = next((a or b for a, b in zip_longest(profile.order, order) if a != b), None)
            if changed is not None:
                raise side_outputs.CannotBeCut(_CHANCE.format(changed[0]))
        if self._left and not self.settled:
            self._check_carried(call, device, self._left)
        self.settled, self._left = True, ()
        return replace(profile, plain_reads=self._plain_reads(call, device, profile))

    def _check_carried(self, call: Call, device: torch.device, left: tuple[LeftTensor, ...]) -> None:
        """Raise CannotBeCut if a second forward reads tensors that the first one has left outside of units."""
        self.forget()
        run = _ProfiledRun(self, device, None, left=left)
        run.run(*call)
        run.mode.carried.check(run.left)

    def _plain_reads(self, call: Call, device: torch.device, profile: Profile) -> frozenset[Read]:
        """Which plain attributes that units store are read by code outside of them, from one more run where there are any."""
        if not any(result.plain for result in profile.results.values()):
            return frozenset()
        self.forget()
        run = _ProfiledRun(self, device, None)
        reads = PlainReads(self.model, profile, lambda: run.mode.key[0], run.results)
        run.ended = reads.ended
        with reads.watching():
            run.run(*call)
        return frozenset(reads.reads)

    def forget(self) -> None:
        """Run all units again."""

    def _refusal(self, error: Exception) -> UnsupportedError:
        """What the failure of a run, in which zeros stood for all values of units, says of the model."""
        name, text = type(self.model).__name__, " ".join(str(error).split())[:300]
        if isinstance(error, RuntimeError) and _NO_GRADIENT in text:
            return UnsupportedError(_DIFFERENTIATES.format(name))
        return UnsupportedError(_READS.format(name, type(error).__name__, text))

    def shape(self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawLog) -> Result:
        """The result of a unit call, as zeros. `drawn` records its random operations."""
        stored, outside = (
            PlainAttributes(self.model.get_submodule(unit)),
            outside_of(self.around, self.shared),
        )
        result = self._shape(unit, forward, call, device, drawn)
        check_outside(unit, outside, outside_of(self.around, self.shared))
        result = replace(result, plain=stored.changed())
        self.stored.append((stored, result.plain))
        return result

    def _shape(self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawLog) -> Result:
        module, kind = self.model.get_submodule(unit), self.kind(unit)
        if kind in self._no_meta:
            return unit_result(unit, module, forward, call, device, use_zeros=True)
        before, unchanged = drawn.mark(), snapshot(*call)
        attributes = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
        try:
            return unit_result(unit, module, forward, call, device)
        except Exception:
            # no meta kernel, or values are read: try again with zeros
            drawn.back_to(before)
            for now, earlier in attributes:
                # it may have taken what code outside has set
                now.clear()
                now.update(earlier)
        result = unit_result(unit, module, forward, unchanged, device, use_zeros=True)
        self._no_meta.add(kind)
        return result

    def kind(self, unit: str) -> Hashable:
        """The same value for units with the same structure."""
        return unit

    def value(self, label: Label, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor that code between units gets for a unit result: zeros without memory, or integers of the batch."""
        return expanded_zeros(like, device) if like.is_floating_point() or is_expanded(like) else like.clone()

    def _run(self, call: Call, device: torch.device, tracer: RowTracer | None) -> Profile:
        run = _ProfiledRun(self, device, tracer)
        profile = run.run(*call)
        self._left = run.left if self._left is None else self._left
        return profile


class _ProfiledRun:
    """One run of a profiler."""

    def __init__(
        self,
        profiler: Profiler,
        device: torch.device,
        tracer: RowTracer | None,
        chance: float | None = None,
        left: Iterable[LeftTensor] = (),
    ) -> None:
        self.profiler, self.device, self.tracer = profiler, device, tracer
        self.model, self.units = profiler.model, profiler.units
        self.mode = LabelMode(tracer, profiler.reads or device.type == "meta", chance, left)
        self.left: tuple[LeftTensor, ...] = ()
        # in the order of the calls
        self.consumes: dict[Key, frozenset[Label]] = {}
        self.results: dict[Key, Result] = {}
        self.of_batch: set[Key] = set()
        self.ended: Callable[[Key], None] = lambda key: None
        # what units have set: (unit, module, name)
        self._put: dict[tuple[str, nn.Module, str], Any] = {}
        self._old_attributes: list[tuple[nn.Module, str, Any]] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Profile:
        """Run the model, and return what was recorded."""
        self._label_inputs(args, kwargs)
        side_outputs.check_backward_hooks(self.model, self.units)
        writes, held = StateWrites(self.model, self.units), HeldTensors(self.profiler.around)
        given = list(tensors_within((args, kwargs)))
        self.mode.memory.give(given)
        self.mode.memory.give(tensor for _, tensor in tensors_held(self.model.named_modules()))
        children = {module: dict(module._modules) for module in self.model.modules()}
        try:
            functions = self.tracer or contextlib.nullcontext()
            # below `functions`, which looks for the code that calls it in a fixed number of frames
            reads = ValueReads(self.mode.read)
            calls = UnitCalls(self.units)
            with calls.handled(self.model, self._unit_call), reads, functions, self.mode:
                output = on_one_device(self.model, *args, **kwargs)
        finally:
            for part, name, value in reversed(self._old_attributes):
                part.__dict__.pop(name, None)
                if value is not _MISSING:
                    part.__dict__[name] = value
            while self.profiler.stored:
                stored, paths = self.profiler.stored.pop()
                stored.restore(paths)
            replaced = [m for m, before in children.items() if m._modules != before]
            for module in replaced:
                module._modules = children[module]
        if replaced:
            name = next(path for path, module in self.model.named_modules() if module is replaced[0])
            raise side_outputs.CannotBeCut(_REPLACES.format(name))
        if not self.consumes:
            raise UnsupportedError(
                f"no module of this {type(self.model).__name__} that can be placed on a stage was called. "
                "A pipeline needs modules that are called through module(...)"
            )
        self.left = held.left(lambda tensor: bool(self.mode.of([tensor])), self.mode.wrote_to, given)
        return self._profile(output, writes)

    def _label_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = rows_of(args, kwargs)
        for tensor in tensors_of((args, kwargs)):
            if tensor.dim() and tensor.shape[0] == rows:
                self.mode.labels[tensor] = frozenset({BATCH})
                if self.tracer is not None:
                    self.tracer.seed(tensor, 0, live=False)
        if self.profiler.reads:
            for unit in self.units:
                for tensor in unit_tensors(self.model.get_submodule(unit)):
                    self.mode.labels[tensor] = frozenset({(unit, PARAMETERS, "", 0)})

    def _unit_call(self, key: Key, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in place of a unit's forward."""
        # tensors inside objects count too: the stage that gets the object may read them
        inside = [tensor for leaf in leaves_of((args, kwargs)) for tensor in pytrees.attribute_tensors(leaf)]
        labels = self.mode.of((args, kwargs, inside)) | self._assigned(key[0])
        labels |= self.mode.numbers
        self.consumes[key] = labels - {BATCH}
        if BATCH in labels or any(label[:2] in self.of_batch for label in labels):
            self.of_batch.add(key)
        paused = contextlib.nullcontext() if self.tracer is None else self.tracer.paused()
        containers = pytrees.containers_of((args, kwargs))
        with self.mode.unit(key, parameters_of(self.model.get_submodule(key[0]))), paused:
            result = self.profiler.shape(key[0], forward, (args, kwargs), self.device, self.mode.draws)
        # tensors that the unit reads elsewhere (a global tensor), code between units may have written
        self.consumes[key] |= self.mode.of(result.read) - {BATCH}
        self.ended(key)
        self.mode.hand_out((args, kwargs, result.output, result.side))
        self.results[key] = result
        self._put_side_outputs(key, result)
        for path, entry in result.put.items():
            entry.put(containers, self._labelled(key, path, result.side[path]))
        return self._labelled(key, "", result.output)

    def _assigned(self, name: str) -> frozenset[Label]:
        """The labels of what code between units, or another unit, has put into attributes of the modules of a unit."""
        unit = self.model.get_submodule(name)
        parts = dict(unit.named_modules())
        given = [
            tensor
            for (path, attribute), tensor in tensors_held(parts.items())
            if self._put.get((name, parts[path], attribute), _MISSING)
            is not parts[path].__dict__.get(attribute)
        ]
        return frozenset(label for label in self.mode.of(given) if label[1] != PARAMETERS)

    def _put_side_outputs(self, key: Key, result: Result) -> None:
        """Set the attributes that the unit sets, and call the hooks of its submodules."""
        unit = self.model.get_submodule(key[0])
        for path, value in result.inside.items():
            if side_outputs.is_attribute(path):
                part, name = side_outputs.part_of(unit, path)
                self._old_attributes.append((part, name, part.__dict__.get(name, _MISSING)))
                part.__dict__[name] = self._put[key[0], part, name] = self._labelled(key, path, value)
            else:
                part = unit.get_submodule(path)
                call_hooks(part, hooks_of(part), self._labelled(key, path, value))

    def _labelled(self, key: Key, path: str, tree: Any) -> Any:
        """The tensors that code between units gets for a unit result."""

        def labelled(index: int, like: torch.Tensor) -> torch.Tensor:
            label = (*key, path, index)
            value = self.profiler.value(label, like, self.device)
            self.mode.returned(value, label)
            if self.tracer is not None:
                self.tracer.returned(value, label)
            return value

        return map_leaves(labelled, tree)

    def _profile(self, output: Any, writes: StateWrites) -> Profile:
        mode, consumes = self.mode, self.consumes
        # a buffer that is created once, and does not depend on the batch, is created on each rank
        buffers = {
            at: b for at, b in writes.buffers(mode.wrote_to).items() if at not in writes.empty or mode.of([b])
        }
        # the loss may be in an object that pytree does not know
        final = (mode.of((output, loss_of(output), list(buffers.values()))) | mode.numbers) - {BATCH}
        used = final.union(*consumes.values())
        side_outputs.check_grown({key: result.grown for key, result in self.results.items()}, used)
        read = tuple(sorted({unit for unit, call, _, _ in used if call == PARAMETERS}))
        draws, of_batch, written = tuple(mode.draws.draws), frozenset(self.of_batch), frozenset(mode.written)
        state, order, results = WrittenState(tuple(buffers), writes.plain()), tuple(consumes), self.results
        reads = self.profiler.reads
        left = {held.at: held.tensor for held in self.left if held.depends}
        return Profile(
            order, consumes, final, results, output, read, draws, of_batch, written, state, reads, left
        )


def call_hooks(module: nn.Module, hooks: Any, output: Any) -> None:
    """Call forward hooks with an output that the module did not compute."""
    for hook in list(hooks.values()):
        hook(module, (), output)
