"""Rows of recurrent layers and cells that are one op: they are batch-independent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright_dtensor.rules.node import NodeView, Row, Slot, numel, rules
from meshwright_dtensor.sharding.states import R, State


def onednn_layer(view: NodeView) -> Iterator[Row]:
    """mkldnn_rnn_layer(x [t, b, i], four weights, h [b, h], c [b, h], ...) -> y [t, b, h], h, c, workspace: the batch.

    The backward pass of the same rank reads the workspace, whose size depends on the local rows. It is empty on fake tensors
    unless the recorder gives its size.
    """
    states = _at(view, {"input": 1, "hx_": 0, "cx_": 0})
    if not view.bound()["batch_sizes"] and len(view.in_shapes[0]) == 3:
        yield states, (1, 0, 0, 0 if numel(view.out_shapes[3]) else R)


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
    places: dict[int, State] = {}
    for name, dim in dims.items():
        given: Any = bound[name]
        if isinstance(given, Slot):
            places[given.index] = dim
    return tuple(places.get(i, R) for i in range(len(view.node.ins)))


RULES = rules(
    "hand",
    ("mkldnn_rnn_layer", onednn_layer),
    ("_thnn_fused_lstm_cell _thnn_fused_gru_cell", fused_cell),
    # the replicated results (reserve, an empty c) carry no gradient
) | rules("hand", ("_cudnn_rnn", cudnn_layers), complete=True)
"""op name -> rule."""
