"""Kinds of operations: those of one kind share a timing curve on a measured machine."""

from __future__ import annotations

import math
from types import MappingProxyType

from meshwright_dtensor.trace.graph import Node

VIEWS = frozenset(
    "view _unsafe_view reshape t transpose permute expand unsqueeze squeeze slice select split split_with_sizes unbind "
    "alias detach as_strided chunk narrow diagonal unfold".split()
)
"""Operations that move no data."""

ATTENTION = frozenset(
    "sdpa _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable".split()
)
"""Fused attention operations: query, key and value come first."""

_NAMES = {
    "embedding": "embedding embedding_bag",
    "dropout": "dropout native_dropout bernoulli",
    "softmax": "cross_entropy softmax _softmax _log_softmax log_softmax",
    "norm": "native_layer_norm layer_norm rms_norm native_group_norm native_batch_norm",
    "function": "gelu silu tanh exp sigmoid pow rsqrt cos sin log erf softplus sqrt",
    "copy": "clone copy cat _to_copy constant_pad_nd index gather scatter stack",
    "reduce": "mean sum amax amin cumsum topk sort var norm",
}
_BY_NAME = MappingProxyType({name: kind for kind, names in _NAMES.items() for name in names.split()})

HEAD_WIDTHS = (16, 32, 64, 128)
"""Head widths at which attention is measured: narrow heads spend their time on exponentials, not on products."""


def attention_kind(width: int) -> str:
    """The kind of attention with heads of a width: the nearest measured width."""
    return f"attention-{min(HEAD_WIDTHS, key=lambda w: (abs(math.log(w / max(width, 1))), w))}"


def base_name(node: Node) -> str:
    """ "mul" of aten.mul.Tensor."""
    return node.name.removeprefix("aten.").split(".")[0]


def kind_of(node: Node, flops: float, width: int = 64) -> str:
    """The kind of a recorded operation; `flops`: of its forward; `width`: last dim of its first input."""
    name = base_name(node)
    if name in VIEWS:
        return "view"
    if name in ATTENTION:
        return attention_kind(width)
    return _BY_NAME.get(name, "matmul" if flops else "pointwise")
