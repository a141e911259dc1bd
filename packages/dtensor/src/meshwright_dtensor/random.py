"""Random numbers of one device, on any layout: draw the whole tensor, keep the rank's box.

Every rank draws every number in the order of one device, so masks and initial values are equal bit for bit, and every
generator ends in the state of one device. Each rank takes the time of the whole tensor. Memory is bounded where drawing in
pieces gives the same numbers; that depends on the op, the build and the processor, so it is tried on a small tensor first.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch

from meshwright_dtensor._torch.core import OpOverload, op_arguments, op_mutates, op_name, pytree
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.sharding import boxes

PIECE_NUMEL = 1 << 22
"""Elements drawn at a time where pieces are possible: a multiple of 16, torch's block of normal numbers."""

_BLOCK = 16

Draw = Callable[[torch.Tensor], Any]
F = TypeVar("F", bound=Callable[..., torch.Tensor])
Span = tuple[int, int]

# Ops that overwrite their first argument with numbers that depend on scalars only.
_FILLS = frozenset(
    f"aten::{name}_" for name in "normal uniform exponential random log_normal cauchy geometric".split()
)
# Ops that draw the same count of numbers for each element, whatever its value.
_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in "bernoulli bernoulli_ rand_like randn_like randint_like normal native_dropout".split()
)
# Ops without tensor arguments: they are given the global shape.
_FACTORIES = frozenset(f"aten::{name}" for name in ("rand", "randn", "randint", "randperm", "normal"))


@dataclass(frozen=True)
class Part:
    """A local tensor's place: the global `shape`, the dims by decreasing stride (`dim_order`), the rank's `box` (or region)."""

    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    box: boxes.Place


_WHOLE: ContextVar[bool] = ContextVar("_WHOLE", default=False)
"""Whether this thread never draws in pieces."""


@contextlib.contextmanager
def without_pieces() -> Iterator[None]:
    """Inside, tensors are drawn whole: a dispatch mode then sees one random operation for each."""
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


class Draws(threading.local):
    """Who makes the draws of this thread: a compiled region takes its random numbers before it runs, in the order of its code.

    Attributes:
        taken: called with a function that makes one draw, it returns a tensor of that form; None lets each draw run at once.
    """

    taken: Callable[[Callable[[], torch.Tensor]], torch.Tensor] | None = None


DRAWS = Draws()
"""Torch functions carry no context, so it is kept per thread."""


def _takeable(draws: F) -> F:
    """Let `DRAWS.taken`, where it is set, decide when the function makes its draw."""

    @wraps(draws)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        taken = DRAWS.taken
        return draws(*args, **kwargs) if taken is None else taken(partial(draws, *args, **kwargs))

    return cast("F", run)


@_takeable
def draw_full_then_slice(
    draw: Draw,
    shape: Sequence[int],
    dim_order: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    box: boxes.Place,
    *,
    generator: torch.Generator | None = None,
    piece_numel: int | None = None,
    gaps: bool = False,
) -> torch.Tensor:
    """Let `draw` fill a tensor of the global `shape`, dense in `dim_order`; return a dense copy of its `box`.

    `draw` works in place and uses the default generator of `device`, or `generator` if one is named here too.
    It advances as on one device. With `piece_numel` (a multiple of 16; only for a `draw` that fills element
    by element) no more than about that many elements beyond the result are held, if a trial shows that pieces
    give the same numbers. With `gaps` the tensor is not dense: torch fills a view of a larger one with other numbers.
    """
    strides = boxes.strides_of(tuple(shape), tuple(dim_order), gaps)
    if gaps:
        piece_numel = None
    only_box = boxes.single_box(box)
    whole = only_box == boxes.whole_box(shape)
    if piece_numel is not None and not whole:
        if piece_numel % _BLOCK:
            raise UsageError(
                f"piece_numel={piece_numel} is not a multiple of {_BLOCK}; use {PIECE_NUMEL}, the default size"
            )
        few, on_cpu = math.prod(shape) <= 2 * piece_numel, torch.device(device).type == "cpu"
        if only_box is not None and on_cpu and not few and not _WHOLE.get():
            contiguous = torch.empty_strided(tuple(shape), strides, device="meta").is_contiguous()
            if _pieces_agree(draw, dtype, contiguous, generator):
                return _draw_in_pieces(draw, shape, dim_order, dtype, only_box, piece_numel)
    full = torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)
    draw(full)
    return full if whole else boxes.copy_region(full, box)


def draws_by_element(op: OpOverload) -> bool:
    """Whether `run_random` can run `op`: the count of numbers it draws does not depend on values of other ranks."""
    return _kind(op) is not None


def run_random(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: Sequence[Part],
    result: Part | None = None,
) -> Any:
    """Run a seeded aten `op` on local tensors; return the local part of what one device returns.

    `parts`: one per tensor in pytree order of (args, kwargs). `result`: the part of the result; by default
    that of the first tensor. Ops in place change and return their local tensor; others return dense copies.
    An op without tensors (`aten.rand`) takes the global size and needs `result`. Raises UnsupportedError for
    an op that draws more or fewer numbers depending on values (`multinomial`, `poisson`): run that one on the
    whole tensors.
    """
    kind = _kind(op)
    if kind is None:
        raise UnsupportedError(
            f"{op} draws more or fewer numbers depending on values that other ranks hold; gather its inputs first"
        )
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(places) != len(parts):
        raise UsageError(
            f"{op} has {len(places)} tensor arguments and {len(parts)} parts were given; give one for each"
        )
    if result is None:
        if not parts:
            raise UsageError(f"{op} takes no tensor, so its result has no known part; give result=Part(...)")
        result = parts[0]
    if kind == "fill":
        local, rest = args[0], args[1:]
        only_box = boxes.single_box(result.box)
        whole = only_box == boxes.whole_box(result.shape) and boxes.dim_order_of(local) == result.dim_order
        if whole and DRAWS.taken is None:
            return op(local, *rest, **kwargs)
        gaps = boxes.has_gaps(local, result.shape, result.dim_order)
        where = result.shape, result.dim_order, local.dtype, local.device, result.box
        generator = kwargs.get("generator")
        with torch.no_grad():
            drawn = draw_full_then_slice(
                lambda x: op(x, *rest, **kwargs),
                *where,
                generator=generator,
                piece_numel=PIECE_NUMEL,
                gaps=gaps,
            )
        return local.copy_(drawn)
    for place, part in zip(places, parts, strict=True):
        leaves[place] = _widen(leaves[place], part)
    full_args, full_kwargs = pytree.tree_unflatten(leaves, spec)
    outputs = op(*full_args, **full_kwargs)
    if op_mutates(op):
        return args[0].copy_(boxes.read_region(full_args[0], result.box))
    box = result.box
    return pytree.tree_map_only(torch.Tensor, lambda output: boxes.copy_region(output, box), outputs)


def _kind(op: OpOverload) -> str | None:
    name = op_name(op)
    tensors = [kind for kind in op_arguments(op).values() if kind == "Tensor"]
    if name in _FILLS or (name == "aten::bernoulli_" and len(tensors) == 1):
        return "fill"
    if name in _ELEMENTWISE and tensors:
        return "elementwise"
    if name in _FACTORIES and not tensors:
        return "factory"
    return None


def _widen(local: torch.Tensor, part: Part) -> torch.Tensor:
    """A tensor of the global shape with `local` in its box and zeros, which all of these ops accept, elsewhere."""
    gaps = boxes.has_gaps(local, part.shape, part.dim_order)
    strides = boxes.strides_of(part.shape, part.dim_order, gaps)
    full = torch.empty_strided(part.shape, strides, dtype=local.dtype, device=local.device).zero_()
    boxes.write_region(full, part.box, local)
    return full


def _pieces_agree(
    draw: Draw, dtype: torch.dtype, contiguous: bool, generator: torch.Generator | None
) -> bool:
    """Whether drawing in pieces gives the numbers and the final state of drawing at once; the generator is restored."""
    stream = torch.default_generator if generator is None else generator
    start = stream.get_state()
    try:
        full = torch.empty(1027, 3, dtype=dtype) if contiguous else torch.empty(3, 1027, dtype=dtype).t()
        draw(full)
        end = stream.get_state()
        stream.set_state(start)
        flat = torch.empty(full.numel(), dtype=dtype)
        for piece in (flat[:1024], flat[1024:2048], flat[2048:]):
            draw(piece)
        at_once = full.reshape(-1) if contiguous else full.t().reshape(-1)
        return torch.equal(at_once, flat) and torch.equal(end, stream.get_state())
    finally:
        stream.set_state(start)


def _draw_in_pieces(
    draw: Draw,
    shape: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
    box: boxes.Box,
    piece_numel: int,
) -> torch.Tensor:
    """Draw along memory, piece after piece, and copy whole rows into the box as they come.

    A row is the largest part of the tensor inside of its first `depth` dims (in memory order) that fits into a piece.
    """
    sizes, spans = [shape[dim] for dim in order], [box[dim] for dim in order]
    depth, row = len(sizes), 1
    while depth > 0 and row * sizes[depth - 1] <= piece_numel:
        depth -= 1
        row *= sizes[depth]
    result = torch.empty([length for _, length in spans], dtype=dtype)
    total = row * math.prod(sizes[:depth])
    buffer = torch.empty(piece_numel + _BLOCK + row, dtype=dtype)
    # elements drawn, of these still in the buffer, rows finished
    drawn = held = done = 0
    while drawn < total:
        left = total - drawn
        # the last piece is never shorter than a block
        count = left if left < piece_numel + _BLOCK else piece_numel
        draw(buffer[held : held + count])
        drawn += count
        held += count
        rows = held // row
        _copy_rows(result, buffer[: rows * row].view(rows, *sizes[depth:]), done, sizes[:depth], spans)
        done += rows
        rest = held - rows * row
        buffer[:rest] = buffer[rows * row : held].clone()
        held = rest
    return result.permute([list(order).index(dim) for dim in range(len(sizes))])


def _copy_rows(
    result: torch.Tensor, rows: torch.Tensor, first: int, outer: Sequence[int], spans: Sequence[Span]
) -> None:
    """Copy the part of `rows` (from number `first` on, counted through the `outer` dims) that is in the box."""
    inner = boxes.slice_of(rows, ((0, rows.shape[0]), *spans[len(outer) :]))
    step = outer[-1]
    start, width = spans[len(outer) - 1]
    others = list(zip(outer[:-1], spans, strict=False))[::-1]
    number = 0
    while number < rows.shape[0]:
        index, along = divmod(first + number, step)
        # the rows that share all outer dims but the last
        count = min(step - along, rows.shape[0] - number)
        place = []
        for size, (offset, length) in others:
            index, coordinate = divmod(index, size)
            place.append(coordinate - offset if offset <= coordinate < offset + length else -1)
        low, high = max(along, start), min(along + count, start + width)
        if low < high and -1 not in place:
            source = inner[number + low - along : number + high - along]
            result[tuple(reversed(place))].narrow(0, low - start, high - low).copy_(source)
        number += count
