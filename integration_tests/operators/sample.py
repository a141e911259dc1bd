"""Operators for every change: those that models use most, and some that have been wrong."""

from __future__ import annotations

MESH = (2,)
NAMES = tuple(
    "add mul sub where cat chunk stack sum mean max.reduction_no_dim softmax matmul bmm addmm cumsum index_select gather "
    "masked_fill sort topk var nn.functional.layer_norm nn.functional.gelu nn.functional.mse_loss nn.functional.linear "
    "nn.functional.embedding nn.functional.dropout linalg.vector_norm nn.functional.pad.circular".split()
)
