"""Operators for every change: those that models use most, and some that have been wrong."""

from __future__ import annotations

MESH = (2,)
NAMES = tuple(
    "add where cat stack mean softmax matmul bmm cumsum masked_fill topk nn.functional.layer_norm nn.functional.mse_loss "
    "nn.functional.embedding nn.functional.dropout nn.functional.pad.circular".split()
)
