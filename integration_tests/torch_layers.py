"""Models of torch's own attention layers: attention with each of its options, encoders, and small models made of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, ROWS, TOKENS = 32, 4, 4, 10


def causal(x: Tensor, size: int) -> Tensor:
    """The mask of later tokens, in the dtype of x."""
    return nn.Transformer.generate_square_subsequent_mask(size).to(x.dtype)


class Attention(nn.Module):
    """One nn.MultiheadAttention.

    Args:
        itself: the input attends to itself, else to two others. weights: asked for, and part of the result.
        mask: "bool", "causal", "heads" (one for each head) or "padding". options: of the layer.
    """

    def __init__(self, itself: bool = True, weights: bool = False, mask: str = "", **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.itself, self.weights, self.mask = itself, weights, mask

    def forward(self, x: Tensor) -> Tensor:
        rows, size = x.shape[:2]
        given: dict[str, Any] = {"need_weights": self.weights}
        if self.mask == "bool":
            given["attn_mask"] = torch.ones(size, size, dtype=torch.bool).triu(1)
        elif self.mask == "causal":
            given |= {"attn_mask": causal(x, size), "is_causal": True}
        elif self.mask == "heads":
            count = rows * HEADS * size * size
            given["attn_mask"] = torch.linspace(-1, 1, count, dtype=x.dtype).view(-1, size, size)
        elif self.mask == "padding":
            given["key_padding_mask"] = (torch.arange(size) > 6).expand(rows, size)
        q = x if self.attention.batch_first else x.transpose(0, 1)
        k = q if self.itself else (2 * q)[..., : self.attention.kdim]
        v = q if self.itself else q.sin()[..., : self.attention.vdim]
        y, weights = self.attention(q, k, v, **given)
        loss: Tensor = y.square().mean()
        if weights is not None:
            loss = loss + (weights * torch.linspace(0, 1, weights.shape[-1], dtype=x.dtype)).mean()
        return loss


def _layer(kind: Any = nn.TransformerEncoderLayer, dropout: float = 0.1, **options: Any) -> Any:
    return kind(WIDTH, HEADS, 4 * WIDTH, dropout, **{"batch_first": True, **options})


class Encoder(nn.Module):
    """nn.TransformerEncoder of rows with padding; the values of all tokens count, those of the padding too."""

    def __init__(self, norm: bool = False, nested: bool = True, **options: Any) -> None:
        super().__init__()
        last = nn.LayerNorm(WIDTH) if norm else None
        self.encoder = nn.TransformerEncoder(_layer(**options), 2, last, enable_nested_tensor=nested)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.encoder(x, src_key_padding_mask=mask)
        return y.square().mean() if torch.is_grad_enabled() else y


class Translator(nn.Module):
    """nn.Transformer."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.whole = nn.Transformer(WIDTH, HEADS, 2, 2, 4 * WIDTH, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.whole(x, x[:, :5], tgt_mask=causal(x, 5), tgt_is_causal=True).square().mean()
        return y


class Whisper(nn.Module):
    """Frames of sound go through convolutions into an encoder, words into a causal decoder with a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(8, WIDTH, 3, padding=1)
        self.outer = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        before = {"activation": "gelu", "norm_first": True}
        self.encoder = nn.TransformerEncoder(_layer(**before), 2, nn.LayerNorm(WIDTH), False)
        self.words, self.places = nn.Embedding(24, WIDTH), nn.Parameter(0.1 * torch.randn(10, WIDTH))
        decoding = _layer(nn.TransformerDecoderLayer, **before)
        self.decoder = nn.TransformerDecoder(decoding, 2, nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        frames = x[..., :8].transpose(1, 2).repeat(1, 1, 2)
        h = self.encoder(F.gelu(self.outer(F.gelu(self.inner(frames)))).transpose(1, 2))
        words = (1000 * x[:, :6, 0].abs()).long() % 24
        y = self.decoder(self.words(words) + self.places[:6], h, tgt_mask=causal(x, 6), tgt_is_causal=True)
        return F.cross_entropy((y @ self.words.weight.T).flatten(0, 1), words.roll(-1, 1).flatten())


class Detr(nn.Module):
    """Objects in images: a convolutional network, nn.Transformer with tokens first, learnt queries, two heads."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(2, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU()
        self.backbone = nn.Sequential(*convolutions, nn.Conv2d(24, WIDTH, 1))
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 4 * WIDTH, 0.1)
        self.classes, self.boxes = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 4)
        self.queries = nn.Parameter(torch.rand(5, WIDTH))
        self.rows, self.columns = (nn.Parameter(torch.rand(8, WIDTH // 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.backbone(x.reshape(-1, 2, 10, 16))
        high, wide = h.shape[-2:]
        columns = self.columns[:wide].unsqueeze(0).repeat(high, 1, 1)
        rows = self.rows[:high].unsqueeze(1).repeat(1, wide, 1)
        places = torch.cat([columns, rows], -1).flatten(0, 1).unsqueeze(1)
        queries = self.queries.unsqueeze(1).repeat(1, h.shape[0], 1)
        y = self.transformer(places + 0.1 * h.flatten(2).permute(2, 0, 1), queries).transpose(0, 1)
        loss: Tensor = self.classes(y).logsumexp(-1).mean() + self.boxes(y).sigmoid().square().mean()
        return loss


class Perceiver(nn.Module):
    """Latent tokens attend to inputs of another width, then to each other, twice with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.3 * torch.randn(6, WIDTH))
        self.first, self.second = nn.LayerNorm(24), nn.LayerNorm(WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, 0.1, kdim=24, vdim=24, batch_first=True)
        self.encoder = nn.TransformerEncoder(_layer(norm_first=True), 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[..., :24])
        z = self.latents.expand(x.shape[0], -1, -1)
        for _ in range(2):
            z = self.encoder(z + self.cross(self.second(z), x, x, need_weights=False)[0])
        loss: Tensor = self.head(z.mean(1)).logsumexp(-1).mean()
        return loss


class Vision(nn.Module):
    """Blocks whose projection of query, key and value is viewed as three, as in most vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.packed = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, packed, out in zip(self.norms, self.packed, self.out, strict=True):
            split = packed(norm(x)).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*split.unbind(0))
            x = x + out(y.transpose(1, 2).flatten(2))
        return x.square().mean()


def _attention() -> dict[str, nn.Module]:
    """One layer for each option, and for some together."""
    padding = {"mask": "padding", "batch_first": True}
    everything = {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.1}
    return {
        "plain": Attention(batch_first=True),
        "no_bias": Attention(bias=False),
        "dropout": Attention(dropout=0.1),
        "dropout_of_weights": Attention(weights=True, dropout=0.1),
        "key_bias": Attention(add_bias_kv=True),
        "all_of_them": Attention(True, True, "bool", **everything),
        "masked": Attention(mask="bool"),
        "causal": Attention(mask="causal"),
        "causal_weights": Attention(weights=True, mask="causal"),
        "heads": Attention(mask="heads"),
        "weights_of_heads": Attention(weights=True, mask="heads"),
        "padding": Attention(mask="padding"),
        "weights_and_padding": Attention(weights=True, **padding),
        "three": Attention(False, True, batch_first=True),
        "widths": Attention(False, kdim=16, vdim=24),
        "weights_of_widths": Attention(False, True, kdim=16, vdim=24, **padding),
    }


class Attentions(nn.Module):
    """All of them on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(_attention())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers.values()]).sum()


MODELS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "attentions": Attentions,
        "encoder": Encoder,
        "norms first": partial(Encoder, True, norm_first=True, activation="gelu"),
        "translator": Translator,
        "whisper": Whisper,
        "detr": Detr,
        "perceiver": Perceiver,
        "vision": Vision,
    }
)
