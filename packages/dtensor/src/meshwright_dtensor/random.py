"""Random numbers of one device, on any layout.

Every rank has the numbers that one device draws for its part, so masks and initial values are equal bit for bit, and every
generator ends in the state of one device. On CPUs each rank draws the numbers of the whole tensor, in pieces, and keeps its
own: time of the whole, memory of its part. What gives the same numbers depends on the op, the build and the processor, so
each way is tried on a small tensor first; if none does, the whole tensor is drawn, and a warning says so.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_dtensor._torch.core import OpOverload, op_mutates, pytree
from meshwright_dtensor.devices import HOST, device_of, on_host
from meshwright_dtensor.drawing import ops
from meshwright_dtensor.drawing.held import Held, Target
from meshwright_dtensor.drawing.shard_streams import shard_stream
from meshwright_dtensor.drawing.whole import PIECE_NUMEL, Draw, Kind, Way, Whole, restored
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.sharding import boxes

__all__ = ["PIECE_NUMEL", "Part", "draw_part", "draws_by_element", "run_random", "without_pieces"]

MOST_BYTES = 1 << 26
"""Memory that a draw may take beyond the rank's part without a warning."""

_BLOCK = 16


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


def draw_part(
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
    target: Target | None = None,
    kind: Kind | None = None,
    per_shard: bool = False,
) -> torch.Tensor:
    """The `box` of a tensor of the global `shape`, dense in `dim_order`, that `draw` fills on one device.

    `draw` works in place and uses the default generator of `device`, or `generator` if one is named here too.
    It advances as on one device. With `piece_numel` (a multiple of 16; only for a `draw` that fills element
    by element) no more than about that many elements beyond the result are held, if a trial shows that pieces
    give the same numbers. With `gaps` the tensor is not dense: torch fills a view of a larger one with other numbers.
    `target`: the numbers are put here (the dims in their own order); its first tensor is the result.
    `kind`: what `draw` does, which ways on GPUs depend on, and remember. `per_shard`: not the numbers of one device, but
    those of a stream of the part (see `shard_stream`): `draw` then fills a tensor of the part's shape.
    """
    shape, order, device = tuple(shape), tuple(dim_order), torch.device(device)
    if piece_numel is not None and piece_numel % _BLOCK:
        raise UsageError(
            f"piece_numel={piece_numel} is not a multiple of {_BLOCK}; use {PIECE_NUMEL}, the default size"
        )
    stream = device_of(device).generator(device) if generator is None else generator

    def drawn(target: Target | None = None) -> torch.Tensor:
        if per_shard:
            return _drawn_alone(draw, shape, order, dtype, device, box, stream, target)
        strides = boxes.strides_of(shape, order, gaps)
        whole = boxes.single_box(box) == boxes.whole_box(shape)
        pieces = 0 if piece_numel is None or _WHOLE.get() else piece_numel
        if pieces and math.prod(shape) > 2 * pieces and (gaps or not whole):
            contiguous = torch.empty_strided(shape, strides, device="meta").is_contiguous()
            described = Whole(draw, dtype, device, contiguous, gaps, stream, pieces, kind)
            held = Held.of(shape, order, box)
            way = _way(described, held)
            if way is not None:
                target = target or Target((_empty_part(order, dtype, device, box),))
                way(described, held, target.on(lambda t: t.permute(order)))
                return target.tensors[0]
            _say_whole(shape, dtype, box)
        full = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        draw(full)
        if target is not None:
            target.put(boxes.read_region(full, box), *target.tensors)
            return target.tensors[0]
        return full if whole else boxes.copy_region(full, box)

    if DRAWS.taken is None:
        return drawn(target)
    numbers = DRAWS.taken(drawn)
    if target is None:
        return numbers
    # what is taken is drawn again later, when these tensors are gone
    target.put(numbers, *target.tensors)
    return target.tensors[0]


def _drawn_alone(
    draw: Draw,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    box: boxes.Place,
    stream: torch.Generator,
    target: Target | None,
) -> torch.Tensor:
    """The numbers of a part from a stream of its own; no other rank's are drawn."""
    local = _empty_part(order, dtype, device, box)
    with shard_stream(stream, device, shape, box, device_of(device).seed_stream):
        draw(local)
    if target is None:
        return local
    target.put(local, *target.tensors)
    return target.tensors[0]


def _empty_part(
    order: tuple[int, ...], dtype: torch.dtype, device: torch.device, box: boxes.Place
) -> torch.Tensor:
    shape = boxes.place_shape(box)
    return torch.empty_strided(shape, boxes.dense_strides(shape, order), dtype=dtype, device=device)


def _way(whole: Whole, held: Held) -> Way | None:
    """How to draw the part without the whole; None if no way is known to give its numbers."""
    return device_of(whole.device).way(whole, held)


def _say_whole(shape: Sequence[int], dtype: torch.dtype, box: boxes.Place) -> None:
    beyond = (math.prod(shape) - math.prod(boxes.place_shape(box))) * dtype.itemsize
    if beyond > MOST_BYTES:
        warnings.warn(
            f"the random numbers of a tensor of shape {list(shape)} ({dtype}) are drawn whole on every rank, {beyond >> 20} MiB "
            "beyond its part: no way to draw a part gives the numbers of one device for this operation here",
            stacklevel=3,
        )


def draws_by_element(op: OpOverload) -> bool:
    """Whether `run_random` can run `op`: the count of numbers it draws does not depend on values of other ranks."""
    return ops.kind(op) is not None


def run_random(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: Sequence[Part],
    result: Part | None = None,
    *,
    per_shard: bool = False,
) -> Any:
    """Run a seeded aten `op` on local tensors; return the local part of what one device returns.

    `parts`: one per tensor in pytree order of (args, kwargs). `result`: the part of the result; by default
    that of the first tensor. Ops in place change and return their local tensor; others return dense copies.
    An op without tensors (`aten.rand`) takes the global size and needs `result`. Raises UnsupportedError for
    an op that draws more or fewer numbers depending on values (`multinomial`, `poisson`): run that one on the
    whole tensors; and for a permutation (`randperm`) of which the whole takes over 64 MiB more than the part.
    """
    kind = ops.kind(op)
    if kind is None:
        raise UnsupportedError(
            f"{op} draws more or fewer numbers depending on values that other ranks hold; gather its inputs first"
        )
    leaves = pytree.tree_leaves((list(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) != len(parts):
        raise UsageError(
            f"{op} has {len(tensors)} tensor arguments and {len(parts)} parts were given; give one for each"
        )
    if result is None:
        if not parts:
            raise UsageError(f"{op} takes no tensor, so its result has no known part; give result=Part(...)")
        result = parts[0]
    if kind == "fill":
        return _run_fill(op, args, kwargs, result, per_shard)
    given = ops.bound(op, args, kwargs)
    if given.get("train") is False:
        return op(*args, **kwargs)
    fill = ops.fill_of(op, given)
    on_cpu = all(on_host(tensor.device) for tensor in tensors)
    if fill is not None and (on_cpu or fill.dtype is None):
        return _run_filled(op, args, kwargs, parts, result, fill, per_shard)
    if per_shard and tensors:
        device = tensors[0].device
        record = device_of(device)
        stream = given["generator"] if given.get("generator") is not None else record.generator(device)
        with shard_stream(stream, device, result.shape, result.box, record.seed_stream):
            return op(*args, **kwargs)
    return _run_whole(op, args, kwargs, parts, result)


def _run_fill(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], part: Part, per_shard: bool
) -> torch.Tensor:
    local, rest = args[0], args[1:]
    whole = (
        boxes.single_box(part.box) == boxes.whole_box(part.shape)
        and boxes.dim_order_of(local) == part.dim_order
    )
    if whole and not per_shard and DRAWS.taken is None:
        filled: torch.Tensor = op(local, *rest, **kwargs)
        return filled
    # autograd has to see the write where it records
    target = None if _records([local]) else Target((local,))
    with torch.no_grad():
        drawn = draw_part(
            lambda x: op(x, *rest, **kwargs),
            part.shape,
            part.dim_order,
            local.dtype,
            local.device,
            part.box,
            generator=kwargs.get("generator"),
            piece_numel=PIECE_NUMEL,
            gaps=boxes.has_gaps(local, part.shape, part.dim_order),
            target=target,
            kind=ops.kind_of_fill(op, args, kwargs),
            per_shard=per_shard,
        )
    return local if drawn is local else local.copy_(drawn)


def _run_filled(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts: Sequence[Part],
    result: Part,
    fill: ops.Fill,
    per_shard: bool,
) -> Any:
    """Fill the part of the result with its numbers, and finish them there."""
    given = ops.bound(op, args, kwargs)
    tensors = [x for x in pytree.tree_leaves((list(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
    forms = [ops.form(t, p.shape, p.dim_order) for t, p in zip(tensors, parts, strict=True)]
    # the mask is the last result of dropout
    shape, strides, dtype = ops.forms_of_results(op, args, kwargs, forms)[-1]
    device = tensors[0].device if tensors else torch.device(given.get("device") or HOST)
    order = boxes.dim_order_of(torch.empty_strided(shape, strides, device="meta"))
    local, recorded, compared = boxes.place_shape(result.box), _records(tensors), ops.put_of(op, given)
    target = None
    with torch.no_grad():
        if compared is not None:
            made = torch.empty_strided(local, boxes.dense_strides(local, order), dtype=dtype, device=device)
            into = args[0] if op_mutates(op) and not recorded else made
            target = Target((into, compared[1].expand(local)), compared[0])
        numbers = draw_part(
            lambda x: fill.run(x, given.get("generator")),
            shape,
            order,
            fill.dtype or dtype,
            device,
            result.box,
            generator=given.get("generator"),
            piece_numel=PIECE_NUMEL,
            gaps=strides != boxes.dense_strides(shape, order),
            target=target,
            kind=ops.kind_of_fill(fill.op, (None, *fill.scalars), {}),
            per_shard=per_shard,
        )
    if op_mutates(op):
        return numbers if numbers is args[0] else args[0].copy_(numbers)
    if fill.dtype is torch.bool:
        return ops.finished(op, given, numbers)
    with torch.no_grad():
        value: torch.Tensor = ops.finished(op, given, numbers)
    if not recorded:
        return value
    # its gradient is that of the operation, which is zero
    with restored(
        device_of(device).generator(device) if given.get("generator") is None else given["generator"]
    ):
        recording: torch.Tensor = op(*args, **kwargs)
    with torch.no_grad():
        return recording.copy_(value)


def _records(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _run_whole(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], parts: Sequence[Part], result: Part
) -> Any:
    """Run the operation on whole tensors, in which the parts of other ranks are zero, and keep this rank's part."""
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if places:
        _say_whole(result.shape, leaves[places[0]].dtype, result.box)
    else:
        beyond = 8 * (math.prod(result.shape) - math.prod(boxes.place_shape(result.box)))
        if beyond > MOST_BYTES:
            raise UnsupportedError(
                f"{op} of {list(result.shape)} over ranks needs the whole permutation on each rank, {beyond >> 20} MiB beyond its "
                "part: draw it replicated, and cut it"
            )
    for place, part in zip(places, parts, strict=True):
        leaves[place] = _widen(leaves[place], part)
    full_args, full_kwargs = pytree.tree_unflatten(leaves, spec)
    outputs = op(*full_args, **full_kwargs)
    if op_mutates(op):
        return args[0].copy_(boxes.read_region(full_args[0], result.box))
    box = result.box
    return pytree.tree_map_only(torch.Tensor, lambda output: boxes.copy_region(output, box), outputs)


def _widen(local: torch.Tensor, part: Part) -> torch.Tensor:
    """A tensor of the global shape with `local` in its box and zeros, which all of these ops accept, elsewhere."""
    gaps = boxes.has_gaps(local, part.shape, part.dim_order)
    strides = boxes.strides_of(part.shape, part.dim_order, gaps)
    full = torch.empty_strided(part.shape, strides, dtype=local.dtype, device=local.device).zero_()
    boxes.write_region(full, part.box, local)
    return full
