"""Kinds of models other than language models, plain torch.nn: convolutions, vision, diffusion, recommendation, recurrence.

Each is written for one device and returns its loss. A small form runs on ranks; a large one, of the size that people train, is
only planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Kind:
    """small, large: build the model. batch: of so many rows, for the small (False) or the large (True) form."""

    small: Callable[[], nn.Module]
    large: Callable[[], nn.Module]
    batch: Callable[[int, bool], dict[str, Tensor]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal ones, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(classes: int, *shape: int, seed: int = 1) -> Tensor:
    """Integers below `classes`, the same on every rank."""
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


# ---- convolutions
class Residual(nn.Module):
    """ResNet's bottleneck (He et al., 2016)."""

    def __init__(self, channels: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.body(x), inplace=True)


class ResNet(nn.Module):
    """A residual network of stages of bottlenecks; (3, 4, 6, 3) of width 64 is ResNet-50."""

    def __init__(self, width: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )  # fmt: skip
        stages, channels = [], width
        for number, depth in enumerate(depths):
            inner = width << number
            blocks = []
            for place in range(depth):
                blocks.append(Residual(channels, inner, 4 * inner, 2 if number and not place else 1))
                channels = 4 * inner
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stages(self.stem(images))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), classes)


# ---- attention over patches
class Attention(nn.Module):
    """Self-attention with one fused projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def mlp(width: int) -> nn.Module:
    """Two layers, four times as wide inside."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp, self.dropout = Attention(width, heads), mlp(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, learned positions (Dosovitskiy et al., 2021)."""

    def __init__(self, width: int, layers: int, heads: int, patch: int, image: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads, 0.1) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), classes)


# ---- diffusion
def waves(times: Tensor, width: int) -> Tensor:
    """Sines and cosines of a time, as positions are encoded."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 2, device=times.device) / (width // 2))
    angles = times[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Modulated(nn.Module):
    """A layer whose norms are scaled, shifted and gated by the time (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention, self.mlp = Attention(width, heads), mlp(width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Predicts the noise that was added to an image (Peebles and Xie, 2023)."""

    def __init__(self, width: int, layers: int, heads: int, patch: int, image: int, channels: int) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.embed = nn.Linear(channels * patch**2, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2, width) * 0.02)
        self.layers = nn.ModuleList(Modulated(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, channels * patch**2)

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        mixed = torch.cos(times)[:, None, None, None] * images + torch.sin(times)[:, None, None, None] * noise
        x = self.embed(self.cut(mixed)) + self.positions
        time = self.time(waves(times, self.width))
        for layer in self.layers:
            x = layer(x, time)
        return F.mse_loss(self.out(self.norm(x)), self.cut(noise))

    def cut(self, images: Tensor) -> Tensor:
        """Patches as rows."""
        rows, channels, height, width = images.shape
        p = self.patch
        parts = images.reshape(rows, channels, height // p, p, width // p, p)
        return parts.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, channels * p * p)


class Step(nn.Module):
    """Two convolutions of a U-Net, told the time."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.first = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.second = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.second(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Down, attention in the middle, up again with what was on the way down (Ho et al., 2020)."""

    def __init__(self, width: int, growth: tuple[int, ...], heads: int, channels: int) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.entry = nn.Conv2d(channels, width, 3, padding=1)
        sizes = [width * factor for factor in growth]
        self.down = nn.ModuleList(Step(a, b, time) for a, b in zip([width, *sizes], sizes))
        self.shrink = nn.ModuleList(nn.Conv2d(size, size, 3, 2, 1) for size in sizes)
        self.middle, self.attention = Step(sizes[-1], sizes[-1], time), Attention(sizes[-1], heads)
        self.grow = nn.ModuleList(nn.Conv2d(size, size, 3, padding=1) for size in sizes)
        self.up = nn.ModuleList(Step(2 * b, a, time) for a, b in zip([width, *sizes], sizes))
        self.norm, self.out = nn.GroupNorm(4, width), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        mixed = torch.cos(times)[:, None, None, None] * images + torch.sin(times)[:, None, None, None] * noise
        time = self.time(waves(times, self.width))
        x, skips = self.entry(mixed), []
        for step, shrink in zip(self.down, self.shrink):
            x = step(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x, time)
        x = x + self.attention(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        for step, grow in zip(reversed(self.up), reversed(self.grow)):
            x = grow(F.interpolate(x, scale_factor=2, mode="nearest"))
            x = step(torch.cat([x, skips.pop()], dim=1), time)
        return F.mse_loss(self.out(F.silu(self.norm(x))), noise)


# ---- recommendation
class Recommender(nn.Module):
    """Tables of embeddings, their products with each other, and two networks (DLRM; Naumov et al., 2019)."""

    def __init__(self, tables: tuple[int, ...], width: int, dense: int, inner: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in tables)
        self.below = nn.Sequential(nn.Linear(dense, inner), nn.ReLU(), nn.Linear(inner, width), nn.ReLU())
        pairs = (len(tables) + 1) * len(tables) // 2
        self.above = nn.Sequential(
            nn.Linear(width + pairs, inner),
            nn.ReLU(),
            nn.Linear(inner, inner),
            nn.ReLU(),
            nn.Linear(inner, 1),
        )

    def forward(self, features: Tensor, items: Tensor, clicked: Tensor) -> Tensor:
        dense = self.below(features)
        looked_up = [table(items[:, number]) for number, table in enumerate(self.tables)]
        together = torch.stack([dense, *looked_up], dim=1)
        products = together @ together.transpose(1, 2)
        first, second = torch.tril_indices(len(looked_up) + 1, len(looked_up) + 1, offset=-1)
        logits = self.above(torch.cat([dense, products[:, first, second]], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


# ---- recurrence
class LanguageLstm(nn.Module):
    """A language model by torch's LSTM."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True, proj_size=width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())


def pictures(small: int, large: int, classes: tuple[int, int]) -> Callable[[int, bool], dict[str, Tensor]]:
    """Images and their classes."""

    def batch(rows: int, whole: bool) -> dict[str, Tensor]:
        size = large if whole else small
        return {"images": numbers(rows, 3, size, size), "classes": labels(classes[whole], rows)}

    return batch


def noised(small: tuple[int, int], large: tuple[int, int]) -> Callable[[int, bool], dict[str, Tensor]]:
    """Images of (channels, pixels), noise of their size, and times."""

    def batch(rows: int, whole: bool) -> dict[str, Tensor]:
        channels, size = large if whole else small
        shape = (rows, channels, size, size)
        return {
            "images": numbers(*shape),
            "noise": numbers(*shape, seed=1),
            "times": numbers(rows, seed=2).abs(),
        }

    return batch


SMALL_TABLES, LARGE_TABLES = (96, 40, 2048), (40_000_000, 20_000_000, *[1_000_000] * 12, *[10_000] * 12)


def clicks(rows: int, whole: bool) -> dict[str, Tensor]:
    """Features, four items of every table, and whether it was clicked."""
    tables = LARGE_TABLES if whole else SMALL_TABLES
    items = torch.stack([labels(size, rows, 4, seed=number) for number, size in enumerate(tables)], dim=1)
    return {"features": numbers(rows, 13), "items": items, "clicked": labels(2, rows).float()}


def words(rows: int, whole: bool) -> dict[str, Tensor]:
    """Tokens, and those that follow."""
    length, vocabulary = (32, 100_000) if whole else (6, 64)
    ids = labels(vocabulary, rows, length + 1)
    return {"ids": ids[:, :-1].contiguous(), "following": ids[:, 1:].contiguous()}


def _kind(build: Callable[..., nn.Module], small: Any, large: Any, batch: Callable[..., Any]) -> Kind:
    return Kind(lambda: build(*small), lambda: build(*large), batch)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "cnn": _kind(ResNet, (8, (1, 2), 5), (64, (3, 4, 6, 3), 1000), pictures(32, 224, (5, 1000))),
        "vit": _kind(VisionTransformer, (32, 2, 4, 4, 12, 5), (1280, 32, 16, 14, 224, 1000), pictures(12, 224, (5, 1000))),
        "dit": _kind(DiffusionTransformer, (32, 2, 4, 2, 8, 3), (1152, 28, 16, 2, 32, 4), noised((3, 8), (4, 32))),
        "unet": _kind(UNet, (8, (1, 2), 4, 3), (320, (1, 2, 4), 8, 4), noised((3, 8), (4, 64))),
        "recommender": _kind(Recommender, (SMALL_TABLES, 16, 13, 32), (LARGE_TABLES, 128, 13, 512), clicks),
        "lstm": _kind(LanguageLstm, (64, 16, 32, 2), (100_000, 1024, 8192, 2), words),
    }
)  # fmt: skip
