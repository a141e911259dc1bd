"""Rows of ops that are a whole layer: attention kernels, recurrent layers, normalisation, convolution, pooling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright_dtensor.rules import node
from meshwright_dtensor.rules.node import NodeView, Row, Rule, Slot
from meshwright_dtensor.sharding.states import P, R, State


def attention(view: NodeView) -> Iterator[Row]:
    """q [b, h, l, e], k [b, g, s, e], v [b, g, s, f]: batch; heads of q and kv together; never with dropout."""
    q, k, v = view.in_shapes[:3]
    if not len(q) == len(k) == len(v) == 4:
        return
    bound = view.bound()
    mask = bound.get("attn_mask") or bound.get("attn_bias")
    out = view.out_shapes[0]
    for dim in (0, 1):
        together = q[dim] == k[dim] == v[dim]
        grouped = dim == 1 and k[1] == v[1] and q[1] % view.n == 0 and k[1] % view.n == 0
        if not together and not grouped:
            continue
        states: list[State] = [R] * len(view.in_shapes)
        states[:3] = [dim] * 3
        if isinstance(mask, Slot):
            shape = view.in_shapes[mask.index]
            index = dim - 4 + len(shape)
            states[mask.index] = index if index >= 0 and shape[index] != 1 else R
        outs = tuple(dim if len(s) > dim and s[: dim + 1] == out[: dim + 1] else R for s in view.out_shapes)
        yield tuple(states), outs


def onednn_layer(view: NodeView) -> Iterator[Row]:
    """mkldnn_rnn_layer(x [t, b, i], four weights, h [b, h], c [b, h], ...) -> y [t, b, h], h, c, workspace: the batch.

    The backward pass of the same rank reads the workspace, whose size depends on the local rows. It is empty on fake tensors
    unless the recorder gives its size.
    """
    states = _at(view, {"input": 1, "hx_": 0, "cx_": 0})
    if not view.bound()["batch_sizes"] and len(view.in_shapes[0]) == 3:
        yield states, (1, 0, 0, 0 if node.numel(view.out_shapes[3]) else R)


def cudnn_layers(view: NodeView) -> Iterator[Row]:
    """_cudnn_rnn(x [t, b, i], weights, ..., h [l, b, h], c) -> y, h, c, reserve, weights: the batch, if not packed."""
    bound = view.bound()
    if bound["batch_sizes"] or len(view.in_shapes[0]) != 3:
        return
    batch = 0 if bound["batch_first"] else 1
    # networks other than LSTM return an empty c; without flattened weights there is no buffer
    cell: State = 1 if isinstance(bound["cx"], Slot) else R
    results: tuple[State, ...] = (batch, 1, cell, R, R)
    yield _at(view, {"input": batch, "hx": 1, "cx": 1}), results[: len(view.node.outs)]


def fused_cell(view: NodeView) -> Iterator[Row]:
    """_thnn_fused_lstm_cell, _thnn_fused_gru_cell(gates [b, g], gates [b, g], state [b, h], biases): the batch."""
    states = tuple(R if len(shape) == 1 else 0 for shape in view.in_shapes)
    yield states, (0,) * len(view.node.outs)


def _at(view: NodeView, dims: Mapping[str, int]) -> tuple[State, ...]:
    """States of the inputs: these arguments are sharded on these dims, the others are replicated."""
    bound = view.bound()
    places = {slot.index: dim for name, dim in dims.items() if isinstance(slot := bound[name], Slot)}
    return tuple(places.get(i, R) for i in range(len(view.node.ins)))


def layer_norm(view: NodeView) -> Iterator[Row]:
    """native_layer_norm and _fused_rms_norm: leading dims; the mean and rstd outputs keep them."""
    return node.kept_rows(view, range(len(view.in_shapes[0]) - len(view.bound()["normalized_shape"])))


def group_norm(view: NodeView) -> Iterator[Row]:
    """native_group_norm: the batch dim; statistics are [N, group]."""
    return node.kept_rows(view, [0])


def batch_norm(view: NodeView) -> Iterator[Row]:
    """Batch norm: channels, if no buffers change; in inference also the batch, since statistics are given."""
    bound, rest = view.bound(), len(view.node.ins) - 1
    running = isinstance(bound.get("running_mean"), Slot)
    if bound.get("training", running is False):
        if not running:
            yield (1, *(0,) * rest), (1, *(0,) * (len(view.node.outs) - 1))
        return
    if any(map(node.numel, view.out_shapes[1:])):
        return
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
        yield from node.kept_rows(view, range(len(view.in_shapes[0]) - spatial))
        if linear and view.floating(0):
            yield node.linear_row(view, 0)

    return rule


def alike(rest: int) -> Rule:
    """All inputs and outputs together, on a dim that all inputs have, but for the last ``rest`` dims."""

    def rule(view: NodeView) -> Iterator[Row]:
        for dim in range(len(view.in_shapes[0]) - rest):
            if len({s[dim : dim + 1] for s in view.in_shapes}) == 1:
                yield (dim,) * len(view.node.ins), (dim,) * len(view.node.outs)

    return rule


def convolution(view: NodeView) -> Iterator[Row]:
    """convolution: batch; output channels; contracted input channels (partial); groups together (depthwise)."""
    bound, count = view.bound(), len(view.node.ins)
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


def loss(view: NodeView) -> Iterator[Row]:
    """Elementwise losses: every dim of the input; a sum or mean gives a partial sum (of a mean: see localise)."""
    out = P if view.bound()["reduction"] else None
    for dim in range(len(view.in_shapes[0])):
        states = tuple(node.broadcast_state(dim, view.in_shapes[0], s) for s in view.in_shapes)
        yield states, (dim if out is None else out,)


def batch_loss(view: NodeView) -> Iterator[Row]:
    """Losses over the classes of each row [n, c]: the rows."""
    shapes, outs = view.in_shapes, (P if view.bound()["reduction"] else 0, 0)
    if len(shapes[0]) == 2:
        states = tuple(0 if s[0] == shapes[0][0] and i < 2 else R for i, s in enumerate(shapes))
        yield states, outs[: len(view.node.outs)]


def matrices(view: NodeView) -> Iterator[Row]:
    """Linear algebra on batches of matrices: the leading dims, which all inputs but numbers have; an empty output has none."""
    lead, shapes = view.in_shapes[0][:-2], view.in_shapes + view.out_shapes
    for dim in range(len(lead)):
        states = [dim if s[: len(lead)] == lead else R for s in shapes]
        if all(
            s == dim or not shape or not node.numel(shape) for s, shape in zip(states, shapes, strict=True)
        ):
            yield tuple(states[: len(view.node.ins)]), tuple(states[len(view.node.ins) :])


def distances(view: NodeView) -> Iterator[Row]:
    """_cdist_forward and _euclidean_dist(x [..., p, m], y [..., r, m]) -> [..., p, r]: leading dims, rows of x, rows of y."""
    out, (x, y) = view.out_shapes[0], view.in_shapes
    for dim in range(len(out) - 2):
        yield tuple(node.broadcast_state(dim, out, shape) for shape in (x, y)), (dim,)
    yield (len(x) - 2, R), (len(out) - 2,)
    yield (R, len(y) - 2), (len(out) - 1,)


def grid_sampler(view: NodeView) -> Iterator[Row]:
    """grid_sampler_2d, grid_sampler_3d(x [n, c, ...], grid [n, ..., 2 or 3]): batch, channels, dims of the grid."""
    yield (0, 0), (0,)
    yield (1, R), (1,)
    for dim in range(1, len(view.in_shapes[1]) - 1):
        yield (R, dim), (dim + 1,)


RULES = node.rules(
    "hand",
    ("mse_loss huber_loss smooth_l1_loss binary_cross_entropy soft_margin_loss", loss),
    ("binary_cross_entropy_with_logits", loss),
    ("multi_margin_loss multilabel_margin_loss_forward", batch_loss),
    ("_cdist_forward _euclidean_dist", distances),
    ("grid_sampler_2d grid_sampler_3d", grid_sampler),
    ("im2col", pooling(3)),
    ("col2im", pooling(2)),
    ("channel_shuffle native_channel_shuffle", group_norm),
    ("mkldnn_rnn_layer", onednn_layer),
    ("_thnn_fused_lstm_cell _thnn_fused_gru_cell", fused_cell),
    ("native_layer_norm _fused_rms_norm", layer_norm),
    ("native_group_norm", group_norm),
    ("_weight_norm_interface", weight_norm),
    ("convolution", convolution),
    ("max_pool2d_with_indices adaptive_max_pool2d", pooling(2, linear=False)),
    ("max_pool3d_with_indices adaptive_max_pool3d", pooling(3, linear=False)),
    ("fractional_max_pool2d max_unpool2d max_pool2d_with_indices_backward", alike(2)),
    ("fractional_max_pool3d max_unpool3d", alike(3)),
    ("avg_pool1d upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d", pooling(1)),
    (
        "avg_pool2d _adaptive_avg_pool2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d",
        pooling(2),
    ),
    ("upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa", pooling(2)),
    (
        "avg_pool3d _adaptive_avg_pool3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
        pooling(3),
    ),
) | node.rules(
    "hand",
    (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math "
        "_scaled_dot_product_attention_math_for_mps",
        attention,
    ),
    ("_cudnn_rnn", cudnn_layers),
    (
        "cholesky linalg_cholesky_ex cholesky_inverse cholesky_solve geqrf linalg_eig _linalg_eigh linalg_eigvals "
        "_linalg_eigvals linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex "
        "linalg_lu_solve lu_unpack linalg_qr _linalg_solve_ex linalg_solve_triangular triangular_solve _linalg_svd ormqr "
        "linalg_householder_product linalg_matrix_exp linalg_pinv _linalg_det _linalg_slogdet",
        matrices,
    ),
    ("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training", batch_norm),
    # replicated results (seeds, masks, the reserve, empty statistics) carry no gradient
    complete=True,
)
"""op name -> rule."""
