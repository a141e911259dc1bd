"""Rows of the aten attention kernels, for calls outside of the attention composite (nn.MultiheadAttention)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright_dtensor.rules.node import NodeView, Row, Slot, rules
from meshwright_dtensor.sharding.states import R, State


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


# seeds and debug masks come out replicated and carry no gradient, hence complete
RULES = rules(
    "hand",
    (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math "
        "_scaled_dot_product_attention_math_for_mps",
        attention,
    ),
    complete=True,
)
"""op name -> rule."""
