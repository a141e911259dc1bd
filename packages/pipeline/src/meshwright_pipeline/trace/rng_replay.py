"""Random numbers of one device, under stages and microbatches.

A watched run of the whole batch tells which random operations one device performs, in which order and on which shapes. At
the start of a step every rank goes through them without the model, and keeps the state of the generator before each that
its stages perform. When a microbatch comes to one, the numbers of the whole batch are drawn from that state, and its rows
kept. So masks are those of one device, bit for bit, and so is the state in which the generator is left.

Recomputation sets the generator to the state that it had when the region first ran. In a step that state draws nothing: it
is a mark, which says how many random operations the microbatch had performed on the stage, and so which one is next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright_dtensor._torch.core import is_fake
from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import TorchDispatchMode, draws, draws_of_its_own, op_name
from meshwright_pipeline.pytrees import tensors_of
from meshwright_pipeline.trace.forward_hooks import Key

_MARKS = 0x6D657368 << 31
"""Seeds from here on are marks: a generator's state says with which seed it was made."""
BETWEEN: Key = ("", 0)
"""Where a random operation stands that no unit performs."""
Filling = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""An operation that fills a tensor in place, and its other arguments."""


@dataclass(frozen=True)
class Draw:
    """One random operation: whose it is, which one there, and what it fills.

    `rest`: its arguments but for the tensor.
    """

    key: Key
    place: int
    op: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rest: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> tuple[Key, int]:
        """What tells it from the others of a forward."""
        return self.key, self.place

    def run(self, numel: int | None = None, given: Filling | None = None) -> torch.Tensor:
        """Draw from the default generator: the whole tensor, or for the sake of the generator `numel` elements.

        `given`: the operation as it is called now, such as a dropout whose probability has changed since.
        """
        op, rest, kwargs = given or (self.op, self.rest, self.kwargs)
        if numel is not None:
            target = torch.empty(numel, dtype=self.dtype)
        else:
            target = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        with torch.no_grad():
            op(target, *rest, **dict(kwargs))
        return target


class DrawRecorder:
    """Takes down the random operations of a watched run."""

    def __init__(self) -> None:
        self.found: list[Draw] = []
        self._counts: Counter[Key] = Counter()

    def mark(self) -> tuple[int, Counter[Key]]:
        """Where it stands."""
        return len(self.found), Counter(self._counts)

    def back_to(self, mark: tuple[int, Counter[Key]]) -> None:
        """Forget what came after `mark`."""
        del self.found[mark[0] :]
        self._counts = Counter(mark[1])

    def note(self, key: Key, op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """An operation of `key` has run."""
        place = self._counts[key]
        self._counts[key] = place + 1
        fills = filling(op, args, kwargs, result)
        if fills is None:
            raise UnsupportedError(
                f"module {key[0] or 'the model'!r} performs the random operation {op_name(op)}, which a pipeline cannot repeat for "
                "the rows of a microbatch; use pp=1, or dropout and in-place random functions"
            )
        op, rest, named = fills
        self.found.append(
            Draw(key, place, op, tuple(result.shape), result.stride(), result.dtype, rest, named)
        )


def filling(op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Filling | None:
    """The operation in place that draws the numbers of this one; None where that is not known, or asks tensors."""
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
    return None


def check_generator(key: Key, op: Any, kwargs: dict[str, Any]) -> None:
    """That numbers come from the generator of one device.

    Raises:
        UnsupportedError: they come from another one, which each microbatch, and each rank that has this code, would draw from.
    """
    if draws_of_its_own(kwargs):
        raise UnsupportedError(
            f"module {key[0] or 'the model'!r} draws random numbers ({op_name(op)}) from a generator of its own, which a pipeline "
            "cannot set to where it stands on one device; draw from the default one, draw outside of the model and give it the "
            "numbers, or plan without pp"
        )


@dataclass
class StepDraws:
    """The random numbers of one step on this rank.

    Attributes:
        states: draw -> state of the generator before it.
        end: that after all of them.
        order: (microbatch, stage) -> the draws that its forward performed, in order.
        marks: (microbatch, stage, draws performed) by the number of the mark; `numbers` leads back.
    """

    states: dict[tuple[Key, int], torch.Tensor] = field(default_factory=dict)
    end: torch.Tensor | None = None
    order: dict[tuple[int, int], list[tuple[Key, int]]] = field(default_factory=dict)
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    numbers: dict[tuple[int, int, int], int] = field(default_factory=dict)


class RngReplay:
    """The random numbers of steps with batches of one signature.

    Args:
        found: those of one device on the whole batch, in order.
        count: microbatches.
    """

    def __init__(self, found: Sequence[Draw], count: int) -> None:
        self.draws, self.count = tuple(found), count
        self._by_name = {draw.name: draw for draw in self.draws}
        self._often = Counter(draw.key for draw in self.draws)
        self._short: dict[Any, bool] = {}
        self._drawn = StepDraws()
        self.microbatch: int | None = None
        self.key = BETWEEN
        self._place: tuple[int, int, int] | None = None
        self._places: Counter[Key] = Counter()

    def begin(self, units: Collection[str]) -> StepDraws:
        """A step begins: go through all draws, and keep the states before those of `units` and between units."""
        self._drawn = StepDraws()
        for draw in self.draws:
            if draw.key == BETWEEN or draw.key[0] in units:
                self._drawn.states[draw.name] = torch.get_rng_state()
            draw.run(1 if self._is_short(draw) else None)
        self._drawn.end = torch.get_rng_state()
        return self._drawn

    def back_to(self, drawn: StepDraws) -> StepDraws:
        """What runs now is the backward pass of that step."""
        self._drawn = drawn
        return drawn

    def forward(self, microbatch: int | None, stage: int = 0) -> None:
        """A forward begins (or, None, has ended)."""
        self.microbatch, self.key = microbatch, BETWEEN
        self._places.clear()
        if microbatch is not None:
            self._drawn.order[microbatch, stage] = []
            self._place = (microbatch, stage, 0)
            self.mark()

    def mark(self) -> None:
        """Let the state of the generator say which random operation is next."""
        if self._place is None:
            return
        numbers, marks = self._drawn.numbers, self._drawn.marks
        if self._place not in numbers:
            numbers[self._place] = len(marks)
            marks.append(self._place)
        torch.default_generator.manual_seed(_MARKS + numbers[self._place])

    def _next(self) -> tuple[int, tuple[Key, int]] | None:
        """(microbatch, name) of the draw that comes next, None where that is not known."""
        if self.microbatch is not None:
            name = (self.key, self._places[self.key])
            self._places[self.key] += 1
            assert self._place is not None
            microbatch, stage, place = self._place
            self._drawn.order[microbatch, stage].append(name)
        else:
            number = torch.default_generator.initial_seed() - _MARKS
            if not 0 <= number < len(self._drawn.marks):
                return None
            microbatch, stage, place = self._drawn.marks[number]
            names = self._drawn.order[microbatch, stage]
            if place >= len(names):
                return None
            name = names[place]
        self._place = (microbatch, stage, place + 1)
        return microbatch, name

    def take(self, op: Any, like: torch.Tensor, given: Filling | None) -> torch.Tensor:
        """The numbers that the next random operation draws, where it fills a tensor of the shape of `like`; `given`: see Draw.

        Raises:
            UnsupportedError: it is none of those that were seen, or comes in a backward pass.
        """
        coming = self._next()
        if coming is None:
            raise UnsupportedError(
                f"the random operation {op_name(op)} runs in a backward pass, where a pipeline does not know which one it is; "
                "recompute with preserve_rng_state=True, keep activations, or set dropout to 0"
            )
        microbatch, name = coming
        draw, state = self._by_name.get(name), self._drawn.states.get(name)
        if draw is None or state is None:
            where = name[0][0] or "between modules"
            raise UnsupportedError(
                f"the random operation {op_name(op)} of {where!r} was not there when the model was profiled; a pipeline needs "
                "the same ones for every batch of the same shapes"
            )
        torch.set_rng_state(state)
        same = given is not None and given[0] is draw.op
        return self._rows(draw.run(None, given if same else None), draw, microbatch, tuple(like.shape))

    def check(self, key: Key) -> None:
        """That the call of a unit which has just ended has drawn as often as it was seen to.

        Raises:
            UnsupportedError: it has not, so that what it has drawn may stand for something else.
        """
        if self._places[key] != self._often[key]:
            raise UnsupportedError(
                f"module {key[0]!r} has performed {self._places[key]} random operations, and {self._often[key]} when the model "
                "was profiled; a pipeline needs the same ones for every batch of the same shapes, which layers that are skipped at "
                "random change, and probabilities that become 0"
            )

    def _rows(self, full: torch.Tensor, draw: Draw, microbatch: int, shape: tuple[int, ...]) -> torch.Tensor:
        fits = len(shape) == full.dim()
        for dim, size in enumerate(shape if fits else ()):
            if full.shape[dim] == size * self.count and self.count > 1:
                full = full.narrow(dim, microbatch * size, size)
        if tuple(full.shape) != shape:
            raise UnsupportedError(
                f"a random operation of {draw.key[0] or 'the model'!r} fills {list(draw.shape)} for the whole batch and "
                f"{list(shape)} for a microbatch, which are not some of its rows; use microbatches=1"
            )
        return full

    def _is_short(self, draw: Draw) -> bool:
        """Whether drawing one element leaves the generator as drawing all does: tried once for each kind."""
        kind = (draw.op, draw.dtype, draw.rest, draw.shape)
        known = self._short.get(kind)
        if known is None:
            before = torch.get_rng_state()
            draw.run()
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            draw.run(1)
            known = self._short[kind] = torch.equal(after, torch.get_rng_state())
            torch.set_rng_state(before)
        return known


class ReplayMode(TorchDispatchMode):
    """Inside, random operations of the model draw the numbers of one device."""

    def __init__(self, streams: RngReplay) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs) or draws_of_its_own(kwargs):
            return func(*args, **kwargs)
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and (target.is_meta or is_fake(target)):
            return func(*args, **kwargs)
        in_place = op_name(func).endswith("_")
        result = target if in_place and target is not None else func(*args, **kwargs)
        result.copy_(self.streams.take(func, result, filling(func, args, kwargs, result)))
        self.streams.mark()
        return result
