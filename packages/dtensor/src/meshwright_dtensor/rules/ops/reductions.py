"""Rows of ops along dims: reductions, scans, sorts, softmax and the normalisations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright_dtensor.rules.node import (
    NodeView,
    Row,
    Rule,
    Slot,
    dims_of,
    kept_rows,
    linear_row,
    numel,
    other_dims,
    rules,
)
from meshwright_dtensor.sharding.states import P, R, State


def _reduced_dims(view: NodeView) -> list[int]:
    return dims_of(view.bound().get("dim"), len(view.in_shapes[0]))


def reduction(view: NodeView) -> Iterator[Row]:
    """Any reduction of one input: the kept dims. A sharded reduced dim is gathered."""
    dims, keep = _reduced_dims(view), bool(view.bound().get("keepdim"))
    for dim in range(len(view.in_shapes[0])):
        if dim not in dims:
            target = dim if keep else dim - sum(d < dim for d in dims)
            yield (dim,), (target,) * len(view.node.outs)


def additive(view: NodeView) -> Iterator[Row]:
    """sum, mean: a sharded reduced dim gives a partial sum (of a mean: the shard's sum over the global count)."""
    yield from counting(view)
    yield from _linear(view)


def counting(view: NodeView) -> Iterator[Row]:
    """count_nonzero: a sharded reduced dim gives a partial sum."""
    yield from reduction(view)
    for dim in _reduced_dims(view):
        if dim < len(view.in_shapes[0]):
            yield (dim,), (P,)


def histogram(view: NodeView) -> Iterator[Row]:
    """histc, histogram(input, bins, weight): any dim, counted into a partial sum, if the bins are given.

    Without bounds the bins depend on the smallest and the largest element of the whole tensor.
    """
    bound, shapes = view.bound(), view.in_shapes
    given = (
        bound.get("range") is not None
        or isinstance(bound["bins"], Slot)
        or bound.get("min") != bound.get("max")
    )
    counts = view.dtype(view.node.outs[0])
    # a float stops counting at 2 / eps (2**24 in float32), and shards would stop later than the whole tensor
    exact = not counts.is_floating_point or numel(shapes[0]) <= 2 / torch.finfo(counts).eps
    if not given or not exact or bound.get("density"):
        return
    for dim in range(len(shapes[0])):
        weight = bound.get("weight")
        divided = (0, weight.index) if isinstance(weight, Slot) else (0,)
        ins: tuple[State, ...] = tuple(dim if i in divided else R for i in range(len(shapes)))
        yield ins, (P, *(R,) * (len(view.node.outs) - 1))


def along(view: NodeView) -> Iterator[Row]:
    """Ops along one dim that keep the shape's rank (softmax, sort, topk, cumprod...): every other dim."""
    return kept_rows(view, other_dims(view)[1])


def cumulative_sum(view: NodeView) -> Iterator[Row]:
    """cumsum: every other dim; linear."""
    yield from along(view)
    yield from _linear(view)


def _linear(view: NodeView) -> Iterator[Row]:
    """The row of a partial input, unless the sum would be rounded before it is reduced."""
    source, target = view.dtype(view.node.ins[0]), view.dtype(view.node.outs[0])
    if source.is_floating_point and target.is_floating_point and target.itemsize >= source.itemsize:
        yield linear_row(view, 0)


def layer_norm(view: NodeView) -> Iterator[Row]:
    """native_layer_norm and _fused_rms_norm: leading dims; the mean and rstd outputs keep them."""
    return kept_rows(view, range(len(view.in_shapes[0]) - len(view.bound()["normalized_shape"])))


def group_norm(view: NodeView) -> Iterator[Row]:
    """native_group_norm: the batch dim; statistics are [N, group]."""
    return kept_rows(view, [0])


def batch_norm(view: NodeView) -> Iterator[Row]:
    """Batch norm in inference: batch and channels.  In training statistics need the whole batch, and buffers change."""
    bound = view.bound()
    running = bound.get("running_mean")
    if bound.get("training", False) or not isinstance(running, Slot):
        return
    if any(map(numel, view.out_shapes[1:])):
        return
    rest = len(view.node.ins) - 1
    for dim in range(len(view.in_shapes[0])):
        states: tuple[State, ...] = (dim, *((0 if dim == 1 else R,) * rest))
        yield states, (dim, *(R,) * (len(view.node.outs) - 1))


def weight_norm(view: NodeView) -> Iterator[Row]:
    """_weight_norm_interface(v, g, dim): the dim that is not reduced."""
    shapes, ndim = view.in_shapes, len(view.in_shapes[0])
    dim = view.bound()["dim"] % ndim
    if len(shapes[1]) == ndim and shapes[1][dim] == shapes[0][dim]:
        yield (dim, dim), (dim, dim)


def pooling(spatial: int, linear: bool = True) -> Rule:
    """Pooling and resampling over the last ``spatial`` dims: batch and channels; if ``linear`` also partial sums."""

    def rule(view: NodeView) -> Iterator[Row]:
        yield from kept_rows(view, range(len(view.in_shapes[0]) - spatial))
        if linear and view.floating(0):
            yield linear_row(view, 0)

    return rule


def convolution(view: NodeView) -> Iterator[Row]:
    """convolution: batch; output channels; contracted input channels (partial); groups together (depthwise)."""
    bound = view.bound()
    bias = isinstance(bound["bias"], Slot)
    count = len(view.node.ins)
    groups, transposed = bound["groups"], bound["transposed"]
    data, weight = view.in_shapes[0], view.in_shapes[1]
    if len(data) != len(weight):
        # no batch dim
        return
    out_dim, in_dim = (1, 0) if transposed else (0, 1)

    def row(x: State, w: State, b: State, out: State) -> Row:
        return (x, w, b)[:count], (out,)

    yield row(0, R, R, 0)
    if groups == 1:
        yield row(R, out_dim, 0, 1)
        yield row(1, in_dim, P, P)
    elif data[1] == groups and weight[0] == groups and not transposed:
        # depthwise, one filter per channel
        yield row(1, 0, 0, 1)
    yield row(P, R, P, P)
    yield row(R, P, P, P)
    assert bias == (count == 3)


RULES = rules(
    "hand",
    ("sum mean", additive),
    (
        "amax amin any all max min argmax argmin logsumexp var std var_mean std_mean prod norm "
        "linalg_vector_norm median mode nanmedian aminmax",
        reduction,
    ),
    ("count_nonzero", counting),
    ("histc histogram", histogram),
    ("_softmax _log_softmax _safe_softmax sort topk cummax cummin cumprod logcumsumexp argsort", along),
    ("cumsum cumsum_", cumulative_sum),
    ("native_layer_norm _fused_rms_norm", layer_norm),
    ("native_group_norm", group_norm),
    ("_weight_norm_interface", weight_norm),
    ("convolution", convolution),
    ("max_pool2d_with_indices adaptive_max_pool2d fractional_max_pool2d", pooling(2, linear=False)),
    ("avg_pool1d upsample_nearest1d upsample_linear1d", pooling(1)),
    ("avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", pooling(2)),
    ("avg_pool3d _adaptive_avg_pool3d upsample_nearest3d upsample_trilinear3d", pooling(3)),
    # saved statistics come out empty and carry no gradient, hence complete
) | rules(
    "hand",
    ("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training", batch_norm),
    complete=True,
)
"""op name -> rule."""
