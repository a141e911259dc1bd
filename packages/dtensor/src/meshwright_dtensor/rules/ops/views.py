"""Rows of ops that only rearrange elements: a sharded dim becomes a sharded dim of the output, if it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshwright_dtensor.rules.node import NodeView, Row, Rule, Slot, linear_row, numel, other_dims, rules
from meshwright_dtensor.sharding.states import R

DimMap = Callable[[int], int | None]


def reshape_dim(before: tuple[int, ...], after: tuple[int, ...], dim: int, n: int) -> int | None:
    """The dim of ``after`` whose shard holds the same elements as the shard of ``before`` on ``dim``, or None.

    A shard of ``dim`` cuts the flat index at the outer product ``prod(before[:dim])``; a dim of ``after`` with the same
    outer product is cut at the same places if both sizes divide by ``n``, or if the dim survives whole.
    """
    if 0 in before:
        return None
    outer, size = numel(before[:dim]), before[dim]
    product = 1
    for index, extent in enumerate(after):
        if product == outer and extent > 1 and (extent == size or (size % n == 0 and extent % n == 0)):
            return index
        product *= extent
    return None


def _moved(view: NodeView, move: DimMap, linear: bool = True) -> Iterator[Row]:
    """One row per dim of the first input that ``move`` keeps; all outputs alike; partial sums pass."""
    rest = (R,) * (len(view.node.ins) - 1)
    for dim in range(len(view.in_shapes[0])):
        target = move(dim)
        if target is not None:
            yield (dim, *rest), (target,) * len(view.node.outs)
    if linear and view.floating(0):
        yield linear_row(view, 0)


def reshape(view: NodeView) -> Iterator[Row]:
    """view, reshape, squeeze: the dim with the same elements in flat order (a sharded dim has more than 1 element)."""
    before, after = view.in_shapes[0], view.out_shapes[0]
    return _moved(view, lambda dim: reshape_dim(before, after, dim, view.n))


def permute(view: NodeView) -> Iterator[Row]:
    """permute, transpose, t: a renaming of dims."""
    ndim = len(view.in_shapes[0])
    order = list(range(ndim))
    bound = view.bound()
    if "dims" in bound:
        order = [d % ndim for d in bound["dims"]]
    elif ndim >= 2:
        first, second = (bound["dim0"] % ndim, bound["dim1"] % ndim) if "dim0" in bound else (0, 1)
        order[first], order[second] = order[second], order[first]
    return _moved(view, order.index)


def unsqueeze(view: NodeView) -> Iterator[Row]:
    """unsqueeze: later dims move up by one."""
    place = view.bound()["dim"] % (len(view.in_shapes[0]) + 1)
    return _moved(view, lambda dim: dim + (dim >= place))


def expand(view: NodeView) -> Iterator[Row]:
    """expand: kept dims stay; a new dim may be sharded from a replicated input, since all its parts are equal."""
    before, after = view.in_shapes[0], view.out_shapes[0]
    shift = len(after) - len(before)
    yield from _moved(view, lambda dim: dim + shift if before[dim] == after[dim + shift] else None)
    for dim, size in enumerate(after):
        if size > 1 and (dim < shift or before[dim - shift] == 1):
            yield (R,), (dim,)


def keep_untouched(view: NodeView) -> Iterator[Row]:
    """slice, narrow: dims taken whole survive."""
    before, after = view.in_shapes[0], view.out_shapes[0]
    return _moved(view, lambda dim: dim if before[dim] == after[dim] else None)


def select(view: NodeView) -> Iterator[Row]:
    """select, unbind: the dim disappears; later dims move down."""
    gone, _ = other_dims(view)
    return _moved(view, lambda dim: None if dim == gone else dim - (dim > gone))


def kept_but(argument: str) -> Rule:
    """split, unfold: all dims but the one that ``argument`` names."""

    def rule(view: NodeView) -> Iterator[Row]:
        used, _ = other_dims(view, argument)
        return _moved(view, lambda dim: dim if dim != used else None)

    return rule


def diagonal(view: NodeView) -> Iterator[Row]:
    """diagonal: the two dims disappear, the diagonal comes last."""
    ndim, bound = len(view.in_shapes[0]), view.bound()
    gone = {bound["dim1"] % ndim, bound["dim2"] % ndim}
    return _moved(view, lambda dim: None if dim in gone else dim - sum(g < dim for g in gone))


def diagonal_written(view: NodeView) -> Iterator[Row]:
    """diag_embed: the dims before the diagonal; diagonal_scatter(self, src): the dims that are not of the diagonal."""
    ndim, bound = len(view.out_shapes[0]), view.bound()
    gone = {bound["dim1"] % ndim, bound["dim2"] % ndim}
    for place, dim in enumerate(d for d in range(ndim) if d not in gone):
        yield (dim, place)[2 - len(view.node.ins) :], (dim,)


def as_complex(view: NodeView) -> Iterator[Row]:
    """view_as_complex, view_as_real: the dim of the two parts is never sharded."""
    shared = min(len(view.in_shapes[0]), len(view.out_shapes[0]))
    return _moved(view, lambda dim: dim if dim < shared else None)


def cat(view: NodeView) -> Iterator[Row]:
    """cat: all dims but the joined one, and that one too for a single operand; legacy 1-D empty operands are dropped."""
    ndim = len(view.out_shapes[0])
    bound = view.bound()
    joined = bound["dim"] % max(ndim, 1)
    shapes = view.in_shapes
    real = [s for s in range(len(shapes)) if not (shapes[s] == (0,) and ndim != 1)]
    for dim in range(ndim):
        if dim != joined or len(real) == 1:
            yield tuple(dim if i in real else R for i in range(len(shapes))), (dim,)
    if all(view.floating(i) for i in real):
        yield linear_row(view, *real)


def stack(view: NodeView) -> Iterator[Row]:
    """stack: every dim of the operands."""
    place = view.bound()["dim"] % len(view.out_shapes[0])
    count = len(view.node.ins)
    for dim in range(len(view.in_shapes[0])):
        yield (dim,) * count, (dim + (dim >= place),)
    if all(view.floating(i) for i in range(count)):
        yield linear_row(view, *range(count))


def repeat(view: NodeView) -> Iterator[Row]:
    """repeat: dims that are repeated once."""
    repeats = view.bound()["repeats"]
    shift = len(repeats) - len(view.in_shapes[0])
    return _moved(view, lambda dim: dim + shift if repeats[dim + shift] == 1 else None)


def flip(view: NodeView) -> Iterator[Row]:
    """flip: dims that are not reversed."""
    ndim = len(view.in_shapes[0])
    turned = [d % max(ndim, 1) for d in view.bound()["dims"]]
    return _moved(view, lambda dim: None if dim in turned else dim)


def roll(view: NodeView) -> Iterator[Row]:
    """roll: dims that are not rolled (no dims given: the flattened tensor, so none)."""
    ndim = len(view.in_shapes[0])
    dims = view.bound()["dims"]
    rolled = [d % ndim for d in dims] if dims else list(range(ndim))
    return _moved(view, lambda dim: None if dim in rolled else dim)


def pad(view: NodeView) -> Iterator[Row]:
    """constant_pad_nd: dims that get no padding; linear when padding with 0."""
    bound = view.bound()
    ndim, widths = len(view.in_shapes[0]), bound["pad"]
    padded = {ndim - 1 - i // 2 for i, width in enumerate(widths) if width}
    return _moved(view, lambda dim: None if dim in padded else dim, linear=bound["value"] == 0)


def leading_dims(rest: int) -> Rule:
    """All but the last ``rest`` dims (0: same elements): reflection padding; tril and triu, which mask by place in the matrix."""

    def rule(view: NodeView) -> Iterator[Row]:
        ndim = len(view.in_shapes[0])
        return _moved(view, lambda dim: dim if dim < ndim - rest else None)

    return rule


def scattered(view: NodeView) -> Iterator[Row]:
    """slice_scatter, select_scatter: dims that are not written to in part."""
    bound = view.bound()
    source: Any = bound["src"]
    assert isinstance(source, Slot)
    written, others = other_dims(view)
    for dim in others:
        yield (dim, dim - ("index" in bound and dim > written)), (dim,)
    if view.floating(0) and view.floating(source.index):
        yield linear_row(view, 0, source.index)


RULES = rules(
    "view",
    ("view _unsafe_view reshape _reshape_alias view_copy squeeze squeeze_ squeeze_copy", reshape),
    ("permute transpose t numpy_T transpose_copy t_copy permute_copy transpose_ t_", permute),
    ("unsqueeze unsqueeze_copy", unsqueeze),
    ("expand expand_copy", expand),
    ("slice narrow slice_copy narrow_copy", keep_untouched),
    ("select unbind unbind_copy select_copy", select),
    ("split split_with_sizes split_copy split_with_sizes_copy", kept_but("dim")),
    ("unsafe_split unsafe_split_with_sizes unsafe_chunk", kept_but("dim")),
    ("unfold unfold_copy", kept_but("dimension")),
    ("diagonal diagonal_copy", diagonal),
    ("diag_embed diagonal_scatter", diagonal_written),
    ("view_as_complex view_as_real", as_complex),
    (
        "alias detach lift_fresh lift_fresh_copy lift contiguous alias_copy pixel_shuffle pixel_unshuffle",
        leading_dims(0),
    ),
    ("cat concatenate", cat),
    ("stack", stack),
    ("repeat", repeat),
    ("flip rot90", flip),
    ("roll", roll),
    ("constant_pad_nd", pad),
    ("reflection_pad1d replication_pad1d", leading_dims(1)),
    ("reflection_pad2d replication_pad2d tril triu", leading_dims(2)),
    ("reflection_pad3d replication_pad3d", leading_dims(3)),
    ("slice_scatter select_scatter", scattered),
)
"""op name -> rule."""
