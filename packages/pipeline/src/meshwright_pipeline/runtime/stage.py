"""One stage of a model: the user's own forward, in which the modules of other stages are skipped.

Modules of earlier stages return what was received, or zeros where nothing that follows depends on them. When the first
module of a later stage is called, the forward is cut short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import hooks_of, ordinary_call
from meshwright_pipeline.partition.boundaries import Cut
from meshwright_pipeline.pytrees import leaves_of, map_leaves
from meshwright_pipeline.trace.forward_hooks import intercepted
from meshwright_pipeline.trace.loss_denominators import DenominatorCounter, Denominators, GlueMode, Place
from meshwright_pipeline.trace.loss_path import mark_unit_output
from meshwright_pipeline.trace.profile import Key, Label, Profile
from meshwright_pipeline.trace.profiler import call_hooks
from meshwright_pipeline.trace.rng_replay import RngReplay
from meshwright_pipeline.trace.side_outputs import is_attribute, part_of


class _EndOfStage(Exception):
    """Unwinds a forward whose stage has ended. An Exception, so that hooks that are always called are called."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        model: the model, whose other modules are emptied.
        units: names of all units that belong to stages.
        index: which stage it is.
        cut: what runs where, and what crosses.
        profile: of a microbatch of the same shapes.
        ours: per module the ids of forward hooks that are meshwright's own.
        streams: the random numbers of the step, None where the model draws none.
    """

    model: nn.Module
    units: tuple[str, ...]
    index: int
    cut: Cut
    profile: Profile
    ours: Mapping[nn.Module, frozenset[int]]
    streams: RngReplay | None = None

    @property
    def is_last(self) -> bool:
        """Whether the last unit runs here."""
        return self.index == len(self.cut.last) - 1

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Collection[Place]) -> Denominators:
        """What inputs alone decide of one microbatch; no module runs, and nothing is drawn."""

        def skip(key: Key, *_: Any) -> Any:
            return self._skip(key, {})

        counting = DenominatorCounter(wanted)
        with torch.random.fork_rng([]), torch.no_grad(), intercepted(self.model, self.units, skip), counting:
            ordinary_call(self.model, args, kwargs)
        return Denominators(tuple(counting.counts), counting.sums)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[Label, torch.Tensor],
        microbatch: int = 0,
        stop: bool = False,
        glue: GlueMode | None = None,
    ) -> tuple[dict[Label, torch.Tensor], Any]:
        """Run the stage on one microbatch.

        Args:
            received: what the stage before has sent.
            stop: end behind the last unit of the model too.
            glue: sees what functions code between units calls.

        Returns:
            What is to be sent on (of a last stage that stops, `Cut.final`), by label, and the result of the model where this is
            the last stage.

        Raises:
            UnsupportedError: the model calls its modules in another order than it was profiled with, or changes in place what
                has to be sent.
        """
        wanted = frozenset(self.cut.final if stop else self.cut.sent(self.index))
        ends = self.index >= len(self.cut.last) - 1 and not stop
        values: dict[Label, torch.Tensor] = {label: received[label] for label in wanted if label in received}
        versions = {label: _version(value) for label, value in values.items()}

        def handle(key: Key, forward: Callable[..., Any], a: tuple[Any, ...], k: dict[str, Any]) -> Any:
            where = self.cut.stage.get(key)
            if where is None:
                raise UnsupportedError(
                    f"module {key[0]!r} is called for the {key[1] + 1}. time in one forward, which it was not when the cut was "
                    "made; a pipeline needs the same calls for every microbatch of the same shapes"
                )
            if where > self.index:
                raise _EndOfStage
            if where < self.index:
                return self._skip(key, received)
            unseen = contextlib.nullcontext() if glue is None else glue.paused()
            with unseen, self._watched(key, wanted, values), self._drawing(key):
                output = forward(*a, **k)
            if ends:
                mark_unit_output(output)
            for place, leaf in enumerate(leaves_of(output)):
                if (*key, "", place) in wanted:
                    values[(*key, "", place)] = leaf
            for label in wanted:
                if label[:2] == key and is_attribute(label[2]):
                    part, name = part_of(self.model.get_submodule(key[0]), label[2])
                    values[label] = leaves_of(getattr(part, name))[label[3]]
            for label in wanted:
                if label[:2] == key:
                    versions[label] = _version(values[label])
            if stop and key == self.cut.last[-1]:
                raise _EndOfStage
            return output

        result = None
        if self.streams is not None:
            self.streams.forward(microbatch, self.index)
        with intercepted(self.model, self.units, handle), glue or contextlib.nullcontext():
            try:
                result = ordinary_call(self.model, args, kwargs)
                ended = ends
            except _EndOfStage:
                ended = not ends
            finally:
                if self.streams is not None:
                    self.streams.forward(None)
        missing = [label for label in wanted if label not in values]
        if not ended or missing:
            what = (
                f"{missing[0][0]!r} was not called"
                if missing
                else "code of the model catches every Exception"
            )
            raise UnsupportedError(
                f"stage {self.index} did not end where its cut is: {what}; a pipeline needs the same calls for every "
                "microbatch of the same shapes"
            )
        for label, version in versions.items():
            if _version(values[label]) != version:
                raise UnsupportedError(
                    f"what module {label[0]!r} returned is changed in place behind it, and a later stage needs it as it was; "
                    "use the out-of-place form, or cut elsewhere"
                )
        return values, result

    def _skip(self, key: Key, received: Mapping[Label, torch.Tensor]) -> Any:
        unit, result = self.model.get_submodule(key[0]), self.profile.results[key]

        def given(path: str) -> Callable[[int, torch.Tensor], torch.Tensor]:
            def leaf(place: int, zeros: torch.Tensor) -> torch.Tensor:
                label = (*key, path, place)
                if label in self.profile.written and label not in received:
                    return zeros.clone(memory_format=torch.contiguous_format)  # code writes to it
                return received.get(label, zeros)

            return leaf

        for path, value in result.side.items():
            if is_attribute(path):
                part, name = part_of(unit, path)
                if (*key, path) in self.profile.attributes or not hasattr(part, name):
                    part.__dict__[name] = map_leaves(given(path), value)
                continue
            part = unit.get_submodule(path)
            own = self.ours.get(part, frozenset())
            theirs = {number: hook for number, hook in hooks_of(part).items() if number not in own}
            call_hooks(part, theirs, map_leaves(given(path), value))
        return map_leaves(given(""), result.output)

    @contextlib.contextmanager
    def _drawing(self, key: Key) -> Iterator[None]:
        """Inside, random operations are those of this call."""
        if self.streams is None:
            yield
            return
        self.streams.key, before = key, self.streams.key
        try:
            yield
            self.streams.check(key)
        finally:
            self.streams.key = before

    @contextlib.contextmanager
    def _watched(
        self, key: Key, wanted: frozenset[Label], values: dict[Label, torch.Tensor]
    ) -> Iterator[None]:
        """Inside, results of parts of a unit that have to be sent are taken down."""
        handles = []
        for path in {
            path for unit, call, path, _ in wanted if (unit, call) == key and path and not is_attribute(path)
        }:
            part = self.model.get_submodule(key[0]).get_submodule(path)

            def take(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
                for place, leaf in enumerate(leaves_of(output)):
                    if (*key, path, place) in wanted:
                        values[(*key, path, place)] = leaf

            handles.append(part.register_forward_hook(take))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _version(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, GlobalTensor) else tensor
    return 0 if local.is_inference() else local._version
