"""One stage of a model: the user's own forward, in which the modules of other stages are skipped.

Modules of earlier stages return what was received, or zeros where nothing that follows depends on them. The first call of
a module of a later stage ends the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn

from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.utils.names import count_of
from meshwright_pipeline._torch import hooks_of, ordinary_call
from meshwright_pipeline.module_state import comparable
from meshwright_pipeline.partition.boundaries import Cut
from meshwright_pipeline.pytrees import Containers, containers_of, is_plain, leaves_of, map_leaves, tensors_of
from meshwright_pipeline.trace.forward_hooks import Forward, UnitCalls
from meshwright_pipeline.trace.loss import mark_unit_output
from meshwright_pipeline.trace.loss_denominators import (
    BatchDenominatorMode,
    DenominatorCounter,
    MicrobatchNumbers,
    Place,
)
from meshwright_pipeline.trace.meta_model import others_as_zeros
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Key, Label, Profile, Result
from meshwright_pipeline.trace.profiler import call_hooks
from meshwright_pipeline.trace.rng_replay import RngReplay
from meshwright_pipeline.trace.side_outputs import is_attribute, part_of
from meshwright_pipeline.trace.state.plain_attributes import differing, put_plain

Values = Mapping[Label, torch.Tensor]
Wanted = Mapping[Key, tuple[Label, ...]]
"""Unit call -> those of its results that are to be sent."""


_NOTHING = contextlib.nullcontext()


class _EndOfStage(Exception):
    """Ends a forward at the end of its stage. An Exception, so that torch still calls `always_call` hooks."""


@dataclass(frozen=True)
class _UnitCall:
    """What is known of the call of a unit before it runs.

    Attributes:
        module: the unit. `result`: that of the profile. `plain`: see Profile.plain.
        inside: `Result.inside`.
        tensors_only: it returns tensors, and neither puts anything anywhere nor sets what code outside of it reads.
    """

    module: nn.Module
    result: Result
    plain: Mapping[str, Any]
    inside: Mapping[str, Any]
    tensors_only: bool

    @staticmethod
    def of(key: Key, model: nn.Module, profile: Profile) -> _UnitCall:
        result = profile.results[key]
        plain, inside = profile.plain(key), result.inside
        tensors = all(isinstance(leaf, torch.Tensor) for leaf in leaves_of(result.output))
        return _UnitCall(
            model.get_submodule(key[0]), result, plain, inside, tensors and not (plain or result.side)
        )


@dataclass(frozen=True)
class Stage:
    """One stage of a model, in which modules of other stages hold no memory.

    Args:
        calls: takes over the calls of all units that belong to stages.
        profile: of a microbatch of the same shapes.
        own_hooks: module -> ids of the forward hooks that meshwright has registered.
        streams: the random numbers of the step; None where the model draws none.
    """

    model: nn.Module
    calls: UnitCalls
    index: int
    cut: Cut
    profile: Profile
    own_hooks: Mapping[nn.Module, frozenset[int]]
    streams: RngReplay | None = None

    @property
    def is_last(self) -> bool:
        """Whether the last unit runs here."""
        return self.index == len(self.cut.last) - 1

    @cached_property
    def unit_calls(self) -> Mapping[Key, _UnitCall]:
        """What is known of each call of a unit."""
        return {key: _UnitCall.of(key, self.model, self.profile) for key in self.profile.results}

    @cached_property
    def sent(self) -> Wanted:
        """What is sent to the next stage."""
        return _by_call(self.cut.sent(self.index))

    @cached_property
    def final(self) -> Wanted:
        """What the code after the last unit takes."""
        return _by_call(self.cut.final)

    def count(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Collection[Place]
    ) -> MicrobatchNumbers:
        """The loss denominators of one microbatch that inputs alone decide. No module runs, and nothing is drawn."""

        def skip(key: Key, _: Forward, *arguments: Any) -> Any:
            counter.unit()
            return self.skip(key, {}, arguments)

        counter = DenominatorCounter(wanted, leaves_of((args, kwargs)))
        skipping = self.calls.handled(self.model, skip)
        with torch.random.fork_rng([]), torch.no_grad(), self._others((args, kwargs)), skipping, counter:
            ordinary_call(self.model, args, kwargs)
        return MicrobatchNumbers(tuple(counter.counts), counter.sums, tuple(counter.plain), counter.after)

    def _others(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Inside, code between units finds the parameters of other stages, where it looks for them."""
        if not self.profile.reads:
            return contextlib.nullcontext()
        device = next((tensor.device for tensor in tensors_of(call)), HOST)
        return others_as_zeros(self.model, self.calls.units, device)

    def run(
        self,
        call: Call,
        received: Values,
        number: int = 0,
        stop: bool = False,
        glue: BatchDenominatorMode | None = None,
    ) -> tuple[dict[Label, torch.Tensor], Any]:
        """Run the stage on microbatch `number`, with the values `received` from the previous stage.

        `stop`: end after the last unit of the model. `glue`: sees the functions that code between units calls.

        Returns:
            The values to send (of a last stage that stops, `Cut.final`), by label, and the result of the model where this
            is the last stage.

        Raises:
            UnsupportedError: the model calls its modules in another order than in the profile, or writes in place to a
                value that has to be sent.
        """
        forward = _StageForward(self, received, number, stop, glue)
        result, ended = None, False
        if self.streams is not None:
            self.streams.forward(number, self.index)
        with (
            self._others(call),
            self.calls.handled(self.model, forward.call_unit),
            glue or _NOTHING,
        ):
            try:
                result = ordinary_call(self.model, *call)
                ended = forward.is_end
            except _EndOfStage:
                ended = not forward.is_end
            finally:
                if self.streams is not None:
                    self.streams.forward(None)
        return forward.checked_values(ended), result

    def skip(self, key: Key, received: Values, arguments: Any) -> Any:
        """The result of a unit of an earlier stage, without running it; its side outputs are set."""
        call = self.unit_calls[key]
        result, unit = call.result, call.module
        written = self.profile.written

        def values(path: str) -> Callable[[int, torch.Tensor], torch.Tensor]:
            def value(place: int, zeros: torch.Tensor) -> torch.Tensor:
                label = (*key, path, place)
                if label in written and label not in received:
                    # code between units writes to it
                    return zeros.clone(memory_format=torch.contiguous_format)
                return received.get(label, zeros)

            return value

        if not call.tensors_only:
            put_plain(unit, call.plain)
            containers = containers_of(arguments) if result.put else {}
            for path, entry in result.put.items():
                entry.put(containers, map_leaves(values(path), result.side[path]))
            for path, output in call.inside.items():
                self._put_inside(key, unit, path, map_leaves(values(path), output))
        if isinstance(result.output, torch.Tensor):
            return values("")(0, result.output)
        return map_leaves(values(""), result.output)

    def _put_inside(self, key: Key, unit: nn.Module, path: str, value: Any) -> None:
        """Set an attribute that a unit would set, or show hooks the result of a module inside of it."""
        if is_attribute(path):
            module, name = part_of(unit, path)
            if (*key, path) in self.profile.attributes or not hasattr(module, name):
                module.__dict__[name] = value
            return
        module = unit.get_submodule(path)
        ours = self.own_hooks.get(module, frozenset())
        call_hooks(
            module, {number: hook for number, hook in hooks_of(module).items() if number not in ours}, value
        )


def _by_call(labels: Collection[Label]) -> Wanted:
    wanted: dict[Key, tuple[Label, ...]] = {}
    for label in labels:
        wanted[label[:2]] = (*wanted.get(label[:2], ()), label)
    return wanted


class _StageForward:
    """One forward of a stage: intercepts the calls of units and collects the values to send."""

    def __init__(
        self, stage: Stage, received: Values, number: int, stop: bool, glue: BatchDenominatorMode | None
    ) -> None:
        self.stage, self.received, self.stop, self.glue = stage, received, stop, glue
        cut = stage.cut
        self.wanted = stage.final if stop else stage.sent
        # the model returns its result here
        self.is_end = stage.index >= len(cut.last) - 1 and not stop
        # the path from the loss is compared in the first microbatch
        self.marks = self.is_end and not number
        self.values: dict[Label, torch.Tensor] = {}
        self.versions: dict[Label, int] = {}
        for labels in self.wanted.values():
            for label in labels:
                if label in received:
                    self._keep(label, received[label])

    def call_unit(self, key: Key, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit of this stage, skip one of an earlier stage, or end the forward."""
        stage = self.stage
        index = stage.cut.stage.get(key)
        if index is None:
            raise UnsupportedError(
                f"module {key[0]!r} is called {count_of(key[1] + 1, 'time')} in this forward. When the pipeline was planned "
                f"it was called {count_of(key[1], 'time')}. A pipeline needs the same module calls for every microbatch of the "
                "same shapes: use pp=1, or make the calls independent of the data"
            )
        if index > stage.index:
            raise _EndOfStage
        if index < stage.index:
            output = stage.skip(key, self.received, (args, kwargs))
            if self.glue is not None:
                self.glue.unit_ended()
            return output
        call, wanted = stage.unit_calls[key], self.wanted.get(key, ())
        put = call.result.put
        containers = containers_of((args, kwargs)) if put else {}
        glue_paused = self.glue.paused() if self.glue is not None and self.glue.on else _NOTHING
        numbers = _NOTHING if stage.streams is None else stage.streams.unit(key)
        collecting = self._collecting(key, call, wanted) if call.inside and wanted else _NOTHING
        with glue_paused, numbers, collecting:
            output = forward(*args, **kwargs)
        if stage.index < len(stage.cut.last) - 1 and not call.tensors_only:
            self._check_plain(key[0], call, output, containers)
        if self.marks:
            mark_unit_output(output)
        if wanted:
            self._collect_values(key, call, wanted, output, containers)
        if self.stop and key == stage.cut.last[-1]:
            raise _EndOfStage
        if self.glue is not None:
            self.glue.unit_ended()
        return output

    def _collect_values(
        self, key: Key, call: _UnitCall, wanted: Collection[Label], output: Any, containers: Containers
    ) -> None:
        """Take the values of a unit that are sent: of its result, of containers that it fills, and of its attributes."""
        put = call.result.put
        self._collect_outputs(key, "", output)
        for path in put.keys() & {label[2] for label in wanted}:
            self._collect_outputs(key, path, put[path].of(containers))
        for label in wanted:
            if is_attribute(label[2]):
                module, name = part_of(call.module, label[2])
                self.values[label] = leaves_of(getattr(module, name))[label[3]]
            self._keep(label, self.values[label])

    def _check_plain(self, unit: str, call: _UnitCall, output: Any, containers: Containers) -> None:
        """Check that the plain values that a unit returns, puts or stores are those that later stages have."""
        _check_leaves(unit, call.result.output, output)
        for path, entry in call.result.put.items():
            _check_leaves(unit, call.result.side[path], entry.of(containers))
        for name, now, before in differing(call.module, call.plain):
            _refuse_value(f"stores {name!r} =", unit, now, before)

    def _keep(self, label: Label, value: torch.Tensor) -> None:
        """Keep a value that has to be sent. Every stage runs the code that writes to it, on the value from before."""
        self.values[label] = value.clone() if label in self.stage.profile.written else value
        self.versions[label] = _version(self.values[label])

    def checked_values(self, ended: bool) -> dict[Label, torch.Tensor]:
        """The values to send, once the forward has ended. Raises UnsupportedError: see Stage.run."""
        missing = [label for labels in self.wanted.values() for label in labels if label not in self.values]
        if not ended or missing:
            caught = "code of the model catches every Exception"
            cause = f"{missing[0][0]!r} was not called" if missing else caught
            raise UnsupportedError(
                f"stage {self.stage.index} did not end at its cut: {cause}; a pipeline needs the same calls for every microbatch "
                "of the same shapes"
            )
        for label, version in self.versions.items():
            if _version(self.values[label]) != version:
                raise UnsupportedError(
                    f"the result of module {label[0]!r} is written to in place after it, and a later stage needs it as it was; use "
                    "the out-of-place form, or cut elsewhere"
                )
        return self.values

    def _collect_outputs(self, key: Key, path: str, output: Any) -> None:
        wanted = self.wanted.get(key, ())
        for place, leaf in enumerate(leaves_of(output)):
            if (*key, path, place) in wanted:
                self.values[(*key, path, place)] = leaf

    @contextlib.contextmanager
    def _collecting(self, key: Key, call: _UnitCall, wanted: Collection[Label]) -> Iterator[None]:
        """Inside, results of modules inside the unit that have to be sent are collected."""

        def collect(path: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda module, args, output: self._collect_outputs(key, path, output)

        with contextlib.ExitStack() as handles:
            for path in {label[2] for label in wanted}:
                if path in call.inside and not is_attribute(path):
                    module = call.module.get_submodule(path)
                    handles.enter_context(module.register_forward_hook(collect(path)))
            yield


def _check_leaves(unit: str, planned: Any, now: Any) -> None:
    """Check that the plain values of a result are those of the profile, which later stages have. Raises UnsupportedError."""
    for before, value in zip(leaves_of(planned), leaves_of(now), strict=False):
        if isinstance(before, torch.Tensor) or isinstance(value, torch.Tensor) or not is_plain(before):
            continue
        if comparable(before) != comparable(value):
            _refuse_value("returns, or puts into a container that it is given,", unit, value, before)


def _refuse_value(stored: str, unit: str, now: Any, planned: Any) -> NoReturn:
    raise UnsupportedError(
        f"module {unit!r} {stored} {now!r}, and other stages have {planned!r}, as when the pipeline was planned. A pipeline needs "
        "the same plain values in every call: make it a tensor, or plan without pp"
    )


def _version(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, GlobalTensor) else tensor
    return 0 if local.is_inference() else local._version
