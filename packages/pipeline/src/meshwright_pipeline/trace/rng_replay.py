"""Replays the random numbers of one device in a pipeline with microbatches.

A profiled run of the whole batch records the random operations in order, with their shapes. At the start of a step every
rank draws them without the model, and stores the generator state before each operation of its stages. When a microbatch
reaches such an operation, the numbers of the whole batch are drawn from the stored state, and the rows of the microbatch
are used. Dropout masks and the final generator state are bit-identical to one device.

Recomputation restores the generator state from when the region first ran. During a step this state is a marker: it encodes
how many random operations the microbatch had run on the stage, and so which one is next.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright_dtensor._torch.core import fake_mode_active
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.device import generator_of
from meshwright_dtensor.random import without_pieces
from meshwright_pipeline._torch import (
    TorchDispatchMode,
    draws,
    named_arguments,
    op_name,
    uses_other_generator,
)
from meshwright_pipeline.pytrees import tensors_of
from meshwright_pipeline.trace.explicit_draws import explicit_draws
from meshwright_pipeline.trace.profile import BETWEEN, Draw, FillOp, Key

_MARKS = 0x6D657368 << 31
"""Seeds from here on are markers."""


class DrawLog:
    """Records the random operations of a profiled run."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self._counts: Counter[Key] = Counter()

    def mark(self) -> tuple[int, Counter[Key]]:
        """The present position, for `back_to`."""
        return len(self.draws), Counter(self._counts)

    def back_to(self, mark: tuple[int, Counter[Key]]) -> None:
        """Drop the operations recorded since `mark`."""
        del self.draws[mark[0] :]
        self._counts = Counter(mark[1])

    def note(self, key: Key, op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation that the unit call `key` has run."""
        place = self._counts[key]
        self._counts[key] = place + 1
        fills = filling(op, args, kwargs, result)
        if fills is None:
            raise UnsupportedError(
                f"module {key[0] or 'the model'!r} calls the random operation {op_name(op)}. A pipeline cannot replay it for the "
                "rows of a microbatch. Use dropout and in-place random functions, or pp=1"
            )
        op, rest, named = fills
        shape = tuple(result.shape)
        self.draws.append(Draw(key, place, op, shape, result.stride(), result.dtype, rest, named))


def filling(op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> FillOp | None:
    """The in-place operation that draws the same numbers; None if there is none, or if it takes tensor arguments."""
    aten, name = torch.ops.aten, op_name(op)
    if not isinstance(result, torch.Tensor):
        return None
    if args and result is args[0]:
        named = tuple((key, value) for key, value in kwargs.items() if key != "generator")
        return None if tensors_of((args[1:], named)) else (op, tuple(args[1:]), named)
    if name in ("rand", "rand_like"):
        return aten.uniform_.default, (0.0, 1.0), ()
    if name in ("randn", "randn_like"):
        return aten.normal_.default, (0.0, 1.0), ()
    if name in ("randint", "randint_like"):
        given = named_arguments(op, args, kwargs)
        return getattr(aten.random_, "from"), (given.get("low", 0), given["high"]), ()
    return (_permute_, (), ()) if name == "randperm" else None


def _permute_(target: torch.Tensor) -> torch.Tensor:
    """Fill with a random permutation of the places."""
    return target.copy_(torch.randperm(target.numel(), dtype=target.dtype, device=target.device))


def check_generator(key: Key, op: Any, kwargs: dict[str, Any]) -> None:
    """Raises UnsupportedError if an operation uses its own generator, which each microbatch and rank would advance."""
    if uses_other_generator(kwargs):
        raise UnsupportedError(
            f"module {key[0] or 'the model'!r} draws random numbers ({op_name(op)}) from its own generator. A pipeline cannot "
            "replay the state that this generator has on one device. Use the default generator, pass the numbers to the model "
            "as an input, or plan without pp"
        )


@dataclass
class StepDraws:
    """The random numbers of one step on this rank.

    Attributes:
        states: operation -> generator state before it.
        order: (microbatch, stage) -> the operations that its forward has run, in order.
        marks, numbers: marker number -> (microbatch, stage, operations run so far); and the inverse.
    """

    states: dict[tuple[Key, int], torch.Tensor] = field(default_factory=dict)
    order: dict[tuple[int, int], list[tuple[Key, int]]] = field(default_factory=dict)
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    numbers: dict[tuple[int, int, int], int] = field(default_factory=dict)


class RngReplay:
    """Replays random numbers in steps of `count` microbatches whose batches have one signature.

    `recorded`: the random operations on the whole batch, in order. `rows`: of the batch, and of all microbatches together, of
    which the last may be padded. `device`: of the model.
    """

    def __init__(
        self, recorded: Sequence[Draw], count: int, rows: tuple[int, int], device: torch.device
    ) -> None:
        self.device, self.generator = device, generator_of(device)
        self.draws, self.count, self.rows = tuple(recorded), count, rows
        self._by_name = {draw.name: draw for draw in self.draws}
        self._expected = Counter(draw.key for draw in self.draws)
        self._short: dict[Any, bool] = {}
        self._drawn = StepDraws()
        self.microbatch: int | None = None
        self.key = BETWEEN
        self._place: tuple[int, int, int] | None = None
        self._places: Counter[Key] = Counter()

    @contextlib.contextmanager
    def step(self, units: Collection[str], drawn: StepDraws | None = None) -> Iterator[StepDraws]:
        """Inside, random numbers are those of one device.

        Args:
            units: of this rank.
            drawn: of a step whose backwards run. None for a new step: everything is drawn once, and the states before the
                operations of `units` and between units are stored.
        """
        after = self.generator.get_state()
        self._drawn = StepDraws() if drawn is None else drawn
        if drawn is None:
            for draw in self.draws:
                if draw.key == BETWEEN or draw.key[0] in units:
                    self._drawn.states[draw.name] = self.generator.get_state()
                draw.run(self.device, 1 if self._is_short(draw) else None)
            after = self.generator.get_state()
        try:
            with ReplayMode(self), explicit_draws(self.device), without_pieces():
                yield self._drawn
        finally:
            self.forward(None)
            self.generator.set_state(after)

    def forward(self, microbatch: int | None, stage: int = 0) -> None:
        """Begin the forward of a microbatch; None when it has ended."""
        self.microbatch, self.key = microbatch, BETWEEN
        self._places.clear()
        if microbatch is not None:
            self._drawn.order[microbatch, stage] = []
            self._place = (microbatch, stage, 0)
            self.mark()

    def mark(self) -> None:
        """Set the generator to the marker of the next random operation."""
        if self._place is None:
            return
        numbers, marks = self._drawn.numbers, self._drawn.marks
        if self._place not in numbers:
            numbers[self._place] = len(marks)
            marks.append(self._place)
        self.generator.manual_seed(_MARKS + numbers[self._place])

    def _next(self) -> tuple[int, tuple[Key, int]] | None:
        """(microbatch, name) of the next random operation; None if it is unknown."""
        if self.microbatch is not None:
            name = (self.key, self._places[self.key])
            self._places[self.key] += 1
            assert self._place is not None
            microbatch, stage, place = self._place
            self._drawn.order[microbatch, stage].append(name)
        else:
            number = self.generator.initial_seed() - _MARKS
            if not 0 <= number < len(self._drawn.marks):
                return None
            microbatch, stage, place = self._drawn.marks[number]
            names = self._drawn.order[microbatch, stage]
            if place >= len(names):
                return None
            name = names[place]
        self._place = (microbatch, stage, place + 1)
        return microbatch, name

    def take(self, op: Any, like: torch.Tensor, fill: FillOp | None) -> torch.Tensor:
        """The numbers of the next random operation, for a tensor with the shape of `like`. `fill`: see Draw.run.

        Raises UnsupportedError: the operation was not recorded, or runs in a backward pass.
        """
        following = self._next()
        if following is None:
            raise UnsupportedError(
                f"the random operation {op_name(op)} runs in a backward pass, where a pipeline cannot identify it. "
                "Recompute with preserve_rng_state=True, keep activations, or set dropout to 0"
            )
        microbatch, name = following
        draw, state = self._by_name.get(name), self._drawn.states.get(name)
        if draw is None or state is None:
            where = name[0][0] or "between modules"
            raise UnsupportedError(
                f"the random operation {op_name(op)} of {where!r} did not run when the model was profiled. A pipeline needs the "
                "same random operations for every batch of the same shapes"
            )
        self.generator.set_state(state)
        same = fill is not None and fill[0] is draw.op
        full = draw.run(self.device, None, fill if same else None, like)
        shape = tuple(like.shape)
        # a part of a permutation is no permutation
        has_rows = len(shape) == full.dim() and draw.op is not _permute_
        for dim, size in enumerate(shape if has_rows else ()):
            rows = full.shape[dim]
            # of one row, the first microbatch takes all numbers, and the others have none in the batch
            if rows != size and rows * self.rows[1] == size * self.count * self.rows[0]:
                start = min(microbatch * size, rows)
                full = full.narrow(dim, start, min(size, rows - start))
                if full.shape[dim] < size:
                    rest = [*shape[:dim], size - full.shape[dim], *full.shape[dim + 1 :]]
                    full = torch.cat([full, full.new_zeros(rest)], dim)
        if tuple(full.shape) != shape:
            raise UnsupportedError(
                f"a random operation of {draw.key[0] or 'the model'!r} fills {list(draw.shape)} for the whole batch and "
                f"{list(shape)} for a microbatch. These are not rows of the batch; use microbatches=1"
            )
        return full

    @contextlib.contextmanager
    def unit(self, key: Key) -> Iterator[None]:
        """Inside, random operations are those of this unit call.

        Raises UnsupportedError: it ran another number of them than in the profiled run, so its numbers may belong to others.
        """
        before, self.key = self.key, key
        try:
            yield
        finally:
            self.key = before
        if self._places[key] != self._expected[key]:
            raise UnsupportedError(
                f"module {key[0]!r} ran {self._places[key]} random operations; when the model was profiled it ran "
                f"{self._expected[key]}. A pipeline needs the same random operations for every batch of the same shapes: do not "
                "skip layers at random, and do not set a probability to 0 later"
            )

    def _is_short(self, draw: Draw) -> bool:
        """Whether drawing one element advances the generator as far as drawing all: tried once for each kind."""
        kind = (draw.op, draw.dtype, draw.rest, draw.shape)
        # permutations and masks of attention depend on the whole shape
        whole_only = draw.op is _permute_ or op_name(draw.op) == "attention_noise_"
        short = False if whole_only else self._short.get(kind)
        if short is None:
            before = self.generator.get_state()
            draw.run(self.device)
            after = self.generator.get_state()
            self.generator.set_state(before)
            draw.run(self.device, 1)
            short = self._short[kind] = torch.equal(after, self.generator.get_state())
            self.generator.set_state(before)
        return short


class ReplayMode(TorchDispatchMode):
    """Inside, random operations of the model return the numbers of one device."""

    # compiled regions draw their numbers outside of their graphs, in the order of the code
    over_compiled_regions = True

    def __init__(self, replay: RngReplay) -> None:
        super().__init__()
        self.replay = replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs) or uses_other_generator(kwargs):
            return func(*args, **kwargs)
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and (target.is_meta or fake_mode_active()):
            return func(*args, **kwargs)
        in_place = op_name(func).endswith("_")
        result = target if in_place and target is not None else func(*args, **kwargs)
        here = self.replay.device.type
        if not isinstance(result, torch.Tensor) or result.device.type != here:
            raise UnsupportedError(
                f"the model calls the random operation {op_name(func)}, whose numbers a pipeline cannot replay: it replays "
                f"single tensors on {here}, where the model is. Draw them so, or use pp=1"
            )
        result.copy_(self.replay.take(func, result, filling(func, args, kwargs, result)))
        self.replay.mark()
        return result
