"""Rows of ops along dims: reductions, scans, sorts and softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright_dtensor.rules import across, node
from meshwright_dtensor.rules.node import NodeView, Row, Slot
from meshwright_dtensor.sharding.states import P, R, State


def reduction(view: NodeView) -> Iterator[Row]:
    """Any reduction of one input: the kept dims; a reduced dim where results can be combined, else it is gathered."""
    ndim, bound = len(view.in_shapes[0]), view.bound()
    dims, keep = node.dims_of(bound.get("dim"), ndim), bool(bound.get("keepdim"))
    for dim in range(ndim):
        if dim not in dims:
            target = dim if keep else dim - sum(d < dim for d in dims)
            yield (dim,), (target,) * len(view.node.outs)
    yield from across.rows(view)


def additive(view: NodeView) -> Iterator[Row]:
    """sum, mean: a sharded reduced dim gives a partial sum (of a mean: the shard's sum over the global count)."""
    yield from counting(view)
    yield from _linear(view)


def counting(view: NodeView) -> Iterator[Row]:
    """count_nonzero, nansum: a sharded reduced dim gives a partial sum."""
    yield from reduction(view)
    ndim = len(view.in_shapes[0])
    yield from (((dim,), (P,)) for dim in node.dims_of(view.bound().get("dim"), ndim) if dim < ndim)


def histogram(view: NodeView) -> Iterator[Row]:
    """histc, histogram(input, bins, weight): any dim, counted into a partial sum, if the bins are given; rows of histogramdd.

    Without bounds the bins depend on the smallest and the largest element of the whole tensor.
    """
    bound, shapes = view.bound(), view.in_shapes
    given = bound.get("range") is not None or bound.get("min") != bound.get("max")
    edges = bound["bins"] if isinstance(bound["bins"], (list, tuple)) else [bound["bins"]]
    given = given or all(isinstance(bins, Slot) for bins in edges)
    counts = view.dtype(view.node.outs[0])
    # a float stops counting at 2 / eps (2**24 in float32), and shards would stop later than the whole tensor
    exact = not counts.is_floating_point or node.numel(shapes[0]) <= 2 / torch.finfo(counts).eps
    if not given or not exact or bound.get("density"):
        return
    for dim in range(1 if "dd" in view.node.name else len(shapes[0])):
        weight = bound.get("weight")
        divided = (0, weight.index) if isinstance(weight, Slot) else (0,)
        ins: tuple[State, ...] = tuple(dim if i in divided else R for i in range(len(shapes)))
        yield ins, (P, *(R,) * (len(view.node.outs) - 1))


def segments(view: NodeView) -> Iterator[Row]:
    """segment_reduce(data [n, ...], lengths or offsets): the dims that are not cut into segments."""
    lengths = view.in_shapes[1] if len(view.in_shapes) > 1 else ()
    return node.kept_rows(view, range(len(lengths), len(view.in_shapes[0])))


def along(view: NodeView) -> Iterator[Row]:
    """Ops along one dim that keep the shape's rank (softmax, sort, topk, cross...): every other dim, in all inputs."""
    out = view.out_shapes[0]
    for dim in node.other_dims(view)[1] if out else ():
        states = tuple(node.broadcast_state(dim, out, shape) for shape in view.in_shapes)
        yield states, (dim,) * len(view.node.outs)


def transform(view: NodeView) -> Iterator[Row]:
    """Fourier transforms: the dims that are not transformed; linear."""
    used = node.dims_of(view.bound()["dim"], len(view.in_shapes[0]))
    yield from node.kept_rows(view, (dim for dim in range(len(view.in_shapes[0])) if dim not in used))
    yield node.linear_row(view, 0)


def cumulative_sum(view: NodeView) -> Iterator[Row]:
    """cumsum: every other dim; linear."""
    yield from along(view)
    yield from _linear(view)


def _linear(view: NodeView) -> Iterator[Row]:
    """The row of a partial input, unless the sum would be rounded before it is reduced."""
    source, target = view.dtype(view.node.ins[0]), view.dtype(view.node.outs[0])
    if source.is_floating_point and target.is_floating_point and target.itemsize >= source.itemsize:
        yield node.linear_row(view, 0)


RULES = node.rules(
    "hand",
    (
        "amax amin any all max min argmax argmin logsumexp var std var_mean std_mean prod norm "
        "linalg_vector_norm median mode nanmedian kthvalue aminmax",
        reduction,
    ),
    ("histc histogram _histogramdd_from_bin_tensors", histogram),
    # replicated results are combined from those of all ranks; edges of bins carry no gradient
    complete=True,
) | node.rules(
    "hand",
    ("sum mean", additive),
    ("count_nonzero nansum", counting),
    ("_softmax _log_softmax _safe_softmax sort topk cummax cummin cumprod logcumsumexp argsort glu", along),
    ("linalg_cross _softmax_backward_data _log_softmax_backward_data", along),
    ("_fft_r2c _fft_c2r _fft_c2c", transform),
    ("segment_reduce", segments),
    ("cumsum cumsum_", cumulative_sum),
)
"""op name -> rule."""
