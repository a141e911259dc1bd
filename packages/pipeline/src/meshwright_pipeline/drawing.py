"""Random numbers of one device, under stages and microbatches.

A watched run of the whole batch tells which random operations one device performs, in which order and on which shapes. At
the start of a step every rank goes through them without the model, and keeps the state of the generator before each that
its stages perform. When a microbatch comes to one, the numbers of the whole batch are drawn from that state, and its rows
kept. So masks are those of one device, bit for bit, and so is the state in which the generator is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_dtensor._torch import is_fake
from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import TorchDispatchMode, draws, op_name
from meshwright_pipeline.interception import Key

BETWEEN: Key = ("", 0)
"""Where a random operation stands that no unit performs."""


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

    def run(self, numel: int | None = None) -> torch.Tensor:
        """Draw from the default generator: the whole tensor, or for the sake of the generator `numel` elements."""
        if numel is not None:
            target = torch.empty(numel, dtype=self.dtype)
        else:
            target = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        with torch.no_grad():
            self.op(target, *self.rest, **dict(self.kwargs))
        return target


class Draws:
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
        if kwargs.get("generator") is not None:
            return
        place = self._counts[key]
        self._counts[key] = place + 1
        first = result if isinstance(result, torch.Tensor) else None
        if first is None or not args or first is not args[0]:
            fills = _as_fill(op, args, kwargs, first)
        else:
            fills = op, tuple(args[1:]), tuple(kwargs.items())
        if fills is None or first is None:
            raise UnsupportedError(
                f"module {key[0] or 'the model'!r} performs the random operation {op_name(op)}, which a pipeline cannot repeat for "
                "the rows of a microbatch; use pp=1, or dropout and in-place random functions"
            )
        op, rest, named = fills
        self.found.append(Draw(key, place, op, tuple(first.shape), first.stride(), first.dtype, rest, named))


def _as_fill(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor | None
) -> tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]] | None:
    """The operation in place that draws the same numbers as one that makes a tensor."""
    aten = torch.ops.aten
    name = op_name(op)
    if result is None:
        return None
    if name in ("rand", "rand_like"):
        return aten.uniform_.default, (0.0, 1.0), ()
    if name in ("randn", "randn_like"):
        return aten.normal_.default, (0.0, 1.0), ()
    return None


class Streams:
    """The random numbers of one step on this rank.

    Args:
        found: those of one device on the whole batch, in order.
        count: microbatches.
    """

    def __init__(self, found: Sequence[Draw], count: int) -> None:
        self.draws, self.count = tuple(found), count
        self._by_name = {draw.name: draw for draw in self.draws}
        self._states: dict[tuple[Key, int], torch.Tensor] = {}
        self._short: dict[Any, bool] = {}
        self._end: torch.Tensor | None = None
        self.microbatch: int | None = None
        self.key = BETWEEN
        self._places: Counter[Key] = Counter()

    def begin(self, units: Collection[str]) -> None:
        """A step begins: go through all draws, and keep the states before those of `units` and between units."""
        self._states.clear()
        for draw in self.draws:
            if draw.key == BETWEEN or draw.key[0] in units:
                self._states[draw.name] = torch.get_rng_state()
            draw.run(1 if self._is_short(draw) else None)
        self._end = torch.get_rng_state()

    def end(self) -> None:
        """The step has ended: the generator is where one device leaves it."""
        self.microbatch = None
        if self._end is not None:
            torch.set_rng_state(self._end)

    def forward(self, microbatch: int | None) -> None:
        """A forward begins (or, None, has ended)."""
        self.microbatch, self.key = microbatch, BETWEEN
        self._places.clear()

    def take(self, op: Any, like: torch.Tensor) -> torch.Tensor:
        """The numbers that the next random operation draws, where it fills a tensor of the shape of `like`.

        Raises:
            UnsupportedError: it is none of those that were seen, or comes in a backward pass.
        """
        if self.microbatch is None:
            raise UnsupportedError(
                f"the random operation {op_name(op)} runs in a backward pass (recomputation), where a pipeline does not know its "
                "microbatch; keep activations, or set dropout to 0"
            )
        place = self._places[self.key]
        self._places[self.key] = place + 1
        draw = self._by_name.get((self.key, place))
        state = self._states.get((self.key, place))
        if draw is None or state is None:
            where = self.key[0] or "between modules"
            raise UnsupportedError(
                f"the random operation {op_name(op)} of {where!r} was not there when the model was profiled; a pipeline needs "
                "the same ones for every batch of the same shapes"
            )
        torch.set_rng_state(state)
        return self._rows(draw.run(), draw, tuple(like.shape))

    def _rows(self, full: torch.Tensor, draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
        assert self.microbatch is not None
        fits = len(shape) == full.dim()
        for dim, size in enumerate(shape if fits else ()):
            if full.shape[dim] == size * self.count and self.count > 1:
                full = full.narrow(dim, self.microbatch * size, size)
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


class Replay(TorchDispatchMode):
    """Inside, random operations of the model draw the numbers of one device."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and (target.is_meta or is_fake(target)):
            return func(*args, **kwargs)
        kept = torch.get_rng_state()
        in_place = op_name(func).endswith("_")
        result = target if in_place and target is not None else func(*args, **kwargs)
        result.copy_(self.streams.take(func, result))
        torch.set_rng_state(kept)
        return result
