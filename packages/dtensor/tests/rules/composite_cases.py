"""Calls of the composites with their inputs, for the test of every row on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

D = torch.float64
Call = Callable[..., torch.Tensor]
Make = Callable[[], list[torch.Tensor]]


def floats(*shapes: tuple[int, ...], dtype: torch.dtype = D) -> list[torch.Tensor]:
    """Normal numbers."""
    return [torch.randn(shape, dtype=D).to(dtype) for shape in shapes]


def classes(shape: tuple[int, ...], count: int, ignored: int = 0) -> torch.Tensor:
    """Class indices, the first ``ignored`` rows of them -100."""
    target = torch.randint(0, count, shape)
    target.view(-1)[:ignored] = -100
    return target


def logits_of(shape: tuple[int, ...], ignored: int = 0, dtype: torch.dtype = D) -> list[torch.Tensor]:
    """Logits [n, c, ...] and targets."""
    return [*floats(shape, dtype=dtype), classes((shape[0], *shape[2:]), shape[1], ignored)]


def masked() -> list[torch.Tensor]:
    """q, k, v and a mask in which one query sees nothing."""
    mask = torch.rand(4, 1, 6, 5) > 0.4
    mask[1, :, 2] = False
    return [*floats((4, 2, 6, 4), (4, 2, 5, 4), (4, 2, 5, 6)), mask]


def statistics(count: int) -> list[torch.Tensor]:
    """Running mean and variance."""
    return [torch.randn(count, dtype=D), torch.rand(count, dtype=D) + 0.5]


CASES: dict[str, tuple[Call, Make]] = {
    "linear": (F.linear, lambda: floats((4, 6, 8), (12, 8), (12,))),
    "linear odd": (F.linear, lambda: floats((5, 7), (3, 7))),
    "linear 1-D": (F.linear, lambda: floats((8,), (4, 8), (4,))),
    "sdpa": (F.scaled_dot_product_attention, lambda: floats((4, 2, 6, 4), (4, 2, 6, 4), (4, 2, 6, 4))),
    "sdpa causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: floats((4, 6, 5, 4), (4, 6, 5, 4), (4, 6, 5, 4)),
    ),
    "sdpa scale": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        lambda: floats((4, 2, 5, 4), (4, 2, 5, 4), (4, 2, 5, 4)),
    ),
    "sdpa mask": (F.scaled_dot_product_attention, masked),
    "sdpa bias": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda: floats((4, 2, 6, 4), (4, 2, 5, 4), (4, 2, 5, 6), (2, 6, 5)),
    ),
    "sdpa gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda: floats((2, 8, 5, 4), (2, 4, 5, 4), (2, 4, 5, 4)),
    ),
    "sdpa mqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda: floats((2, 4, 5, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
    ),
    "sdpa gqa indivisible": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda: floats((2, 6, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    ),
    "sdpa dropout": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4),
        lambda: floats((4, 2, 6, 4), (4, 2, 6, 4), (4, 2, 6, 4)),
    ),
    "sdpa dropout causal gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.4, is_causal=True, enable_gqa=True
        ),
        lambda: floats((2, 8, 5, 4), (2, 4, 5, 4), (2, 4, 5, 4)),
    ),
    "sdpa dropout mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, dropout_p=0.2),
        masked,
    ),
    "embedding": (F.embedding, lambda: [torch.randint(0, 8, (4, 6)), *floats((8, 12))]),
    "embedding odd": (F.embedding, lambda: [torch.randint(0, 11, (5,)), *floats((11, 3))]),
    "embedding bag": (
        lambda i, w: F.embedding_bag(i, w, mode="sum"),
        lambda: [torch.randint(0, 8, (4, 6)), *floats((8, 12))],
    ),
    "embedding bag mean": (F.embedding_bag, lambda: [torch.randint(0, 11, (4, 3)), *floats((11, 6))]),
    "embedding bag max": (
        lambda i, w: F.embedding_bag(i, w, mode="max"),
        lambda: [torch.randint(0, 8, (8, 3)), *floats((8, 6))],
    ),
    "embedding padding": (
        lambda i, w: F.embedding(i, w, padding_idx=-1),
        lambda: [torch.randint(4, 8, (4, 6)), *floats((8, 12))],
    ),
    "ce": (F.cross_entropy, lambda: logits_of((8, 12))),
    "ce ignore": (F.cross_entropy, lambda: logits_of((8, 12), ignored=3)),
    "ce ignore all of a rank": (F.cross_entropy, lambda: logits_of((8, 12), ignored=4)),
    "ce odd": (F.cross_entropy, lambda: logits_of((7, 9), ignored=1)),
    "ce sum": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), lambda: logits_of((8, 12), ignored=1)),
    "ce none": (lambda x, t: F.cross_entropy(x, t, reduction="none"), lambda: logits_of((8, 12), ignored=1)),
    "ce index": (lambda x, t: F.cross_entropy(x, t, ignore_index=3), lambda: logits_of((8, 12))),
    "ce spatial": (F.cross_entropy, lambda: logits_of((4, 8, 6), ignored=2)),
    "ce spatial none": (
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        lambda: logits_of((4, 8, 6), ignored=2),
    ),
    "ce one row": (F.cross_entropy, lambda: [*floats((8,)), torch.tensor(3)]),
    "ce smoothing": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        lambda: logits_of((8, 12), ignored=3),
    ),
    "ce weight": (F.cross_entropy, lambda: [*logits_of((8, 12), ignored=3), torch.rand(12, dtype=D)]),
    "ce weight smoothing": (
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
        lambda: [*logits_of((8, 12), ignored=3), torch.rand(12, dtype=D)],
    ),
    "ce probabilities": (F.cross_entropy, lambda: [*floats((8, 12)), torch.rand(8, 12, dtype=D).softmax(-1)]),
    "ce float": (F.cross_entropy, lambda: logits_of((8, 12), 2, torch.float32)),
    "ce bytes": (
        F.cross_entropy,
        lambda: [*floats((4, 160)), torch.tensor([156, 3, 0, 156], dtype=torch.uint8)],
    ),
    "ce bf16": (F.cross_entropy, lambda: logits_of((8, 12), 2, torch.bfloat16)),
    "batch_norm train": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, True, 0.3),
        lambda: [*floats((4, 6, 5)), *statistics(6), *floats((6,), (6,))],
    ),
    "batch_norm train 4-D": (
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        lambda: [*floats((4, 3, 4, 2)), *statistics(3)],
    ),
    "batch_norm alone": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        lambda: floats((4, 6), (6,), (6,)),
    ),
    "batch_norm odd": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, True),
        lambda: [*floats((5, 3, 3)), *statistics(3), *floats((3,), (3,))],
    ),
    "batch_norm eval": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        lambda: [*floats((4, 6, 5)), *statistics(6), *floats((6,), (6,))],
    ),
    "dropout": (lambda x: F.dropout(x, 0.3), lambda: floats((4, 6, 8))),
    "dropout transposed": (lambda x: F.dropout(x, 0.3), lambda: [floats((6, 4, 8))[0].transpose(0, 1)]),
    "dropout odd": (lambda x: F.dropout(x, 0.6), lambda: floats((5, 7))),
    "dropout float": (lambda x: F.dropout(x, 0.6), lambda: floats((4, 6), dtype=torch.float32)),
    "dropout all": (lambda x: F.dropout(x, 1.0), lambda: floats((4, 6))),
    "dropout in place": (lambda x: F.dropout(x * 1.0, 0.3, inplace=True), lambda: floats((4, 6))),
}
