"""Training steps as people write them: several models, several losses, running buffers, recurrence, data in control flow.

A case makes its models and optimizers like any script and takes a step with them; nothing in it knows of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

ROWS = 4
Models = dict[str, nn.Module]
Optimizers = dict[str, torch.optim.Optimizer]


@dataclass(frozen=True)
class Script:
    """models: built under a seed. examples: per model, the arguments that it is planned with. step: one training step,
    which returns its losses; batches differ from step to step.
    """

    models: Callable[[], Models]
    examples: Callable[[], dict[str, Any]]
    step: Callable[[Models, Optimizers, int], list[Tensor]]


def noise(*shape: int, seed: int) -> Tensor:
    """The same numbers on every rank, whatever was drawn before."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def targets(classes: int, *shape: int, seed: int) -> Tensor:
    """Labels, as `noise`."""
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def supervised(
    model: Callable[[], nn.Module], batch: Callable[[int], Any], loss: Callable[[Any, int], Tensor]
) -> Script:
    """One model and one loss, the usual loop."""

    def step(models: Models, optimizers: Optimizers, number: int) -> list[Tensor]:
        value = loss(models["model"](*batch(number)), number)
        optimizers["model"].zero_grad()
        value.backward()
        return [value]

    return Script(lambda: {"model": model()}, lambda: {"model": batch(0)}, step)


def classified(model: Callable[[], nn.Module], *shape: int, classes: int = 6) -> Script:
    """A model from one float tensor to logits over classes (the last dim), with cross-entropy."""

    def loss(logits: Tensor, number: int) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(flat, targets(classes, flat.shape[0], seed=50 + number))

    return supervised(model, lambda number: (noise(*shape, seed=number),), loss)


# ---- several models, several losses
def gan() -> Script:
    """Generator and discriminator, two optimizers; the discriminator sees detached samples, then live ones."""

    def models() -> Models:
        return {
            "generator": nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.Tanh()),
            "critic": nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1)),
        }

    def step(models: Models, optimizers: Optimizers, number: int) -> list[Tensor]:
        generator, critic = models["generator"], models["critic"]
        real, seed = noise(ROWS, 16, seed=number), noise(ROWS, 8, seed=90 + number)
        fake = generator(seed)
        optimizers["critic"].zero_grad()
        on_real, on_fake = critic(real), critic(fake.detach())
        critic_loss = F.binary_cross_entropy_with_logits(
            on_real, torch.ones_like(on_real)
        ) + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
        critic_loss.backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        verdict = critic(fake)
        generator_loss = F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
        generator_loss.backward()
        return [critic_loss, generator_loss]

    examples = {"generator": (noise(ROWS, 8, seed=0),), "critic": (noise(ROWS, 16, seed=0),)}
    return Script(models, lambda: examples, step)


class TwoHeads(nn.Module):
    """One trunk, two heads, two losses of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.LayerNorm(32))
        self.classes, self.value = nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.classes(hidden), self.value(hidden).squeeze(-1)


def two_losses() -> Script:
    """Two backward passes through one graph."""

    def step(models: Models, optimizers: Optimizers, number: int) -> list[Tensor]:
        optimizers["model"].zero_grad()
        logits, value = models["model"](noise(ROWS, 10, seed=number))
        first = F.cross_entropy(logits, targets(6, ROWS, seed=number))
        second = F.mse_loss(value, noise(ROWS, seed=70 + number))
        first.backward(retain_graph=True)
        (0.3 * second).backward()
        return [first, second]

    return Script(lambda: {"model": TwoHeads()}, lambda: {"model": (noise(ROWS, 10, seed=0),)}, step)


# ---- convolution and statistics of the batch
class Convolutional(nn.Module):
    """Convolutions with batch norm in training mode, a residual, two kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8, momentum=None), nn.ReLU()
        )
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        x = F.max_pool2d(x, 2)
        x = F.relu(self.norm(self.down(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


# ---- recurrence
class Recurrent(nn.Module):
    """A layer of torch's recurrent modules between an embedding and a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(10, 16, batch_first=True, **options)
        self.head = nn.Linear(16 * (1 + self.layer.bidirectional), 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layer(x)
        return self.head(hidden)


class CellLoop(nn.Module):
    """A cell called in a Python loop, its states handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(10, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 16)
        c = torch.zeros(x.shape[0], 16)
        seen = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            seen.append(h)
        return self.head(torch.stack(seen, dim=1))


# ---- code that torch does not know
class Swish(torch.autograd.Function):
    """x * sigmoid(x) with a derivative written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.slope * x)
        return gradient * (s + ctx.slope * x * s * (1 - s)), None


class OwnFunction(nn.Module):
    """A custom autograd function between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Swish.apply(self.up(x), 1.5))


class Branching(nn.Module):
    """Control flow on shapes and on values: a branch, a number read out, a loop that ends by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(10, 32), nn.Linear(10, 32)
        self.step, self.head = nn.Linear(32, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 3:
            x = x[:, :3]
        h = self.first(x) if x.sum() > 0 else self.other(x)
        scale = h.abs().max().item()
        h = h / scale
        rounds = 0
        while h.norm() < 8 and rounds < 3:
            h = h + torch.tanh(self.step(h))
            rounds += 1
        if bool((h > 0).all()):
            h = -h
        return self.head(h) * (1 + rounds)


class Remembering(nn.Module):
    """Buffers written in forward: in place, by assignment, a counter, a table by index; they feed the output."""

    mean: Tensor
    steps: Tensor
    table: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 32), nn.Linear(32, 6)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("spread", torch.ones(32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(5, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.mean(dim=0))
            self.spread = 0.9 * self.spread + 0.1 * h.detach().var(dim=0)
            self.steps += 1
            self.table[int(self.steps) % 5] = h.detach()[0]
        return self.down((h - self.mean) / (self.spread + 0.1) + self.table.mean(dim=0))


class Symmetric(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    """Weight norm, spectral norm (whose vectors are buffers) and a parametrization of one's own."""
    square = nn.Linear(32, 32)
    parametrize.register_parametrization(square, "weight", Symmetric())
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(10, 32)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)),
        nn.Tanh(),
        square,
        nn.utils.weight_norm(nn.Linear(32, 6)),
    )


class Attending(nn.Module):
    """nn.MultiheadAttention called by hand, with a mask and its weights asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, kdim=16, vdim=16, batch_first=True)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        h, weights = self.attention(x, x, x, attn_mask=mask)
        h = x + h
        again, _ = self.cross(h, x, x, need_weights=False)
        return self.head(h + again) + weights.sum(dim=-1, keepdim=True)


def encoder() -> nn.Module:
    """torch's own transformer encoder."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 6))


class Spectral(nn.Module):
    """Mixing by Fourier transforms with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(5, 16, dtype=torch.cfloat) * 0.3)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        f = torch.fft.rfft(h, dim=1, norm="ortho")
        h = torch.fft.irfft(f * self.weight, n=x.shape[1], dim=1, norm="ortho") + torch.fft.fft2(h).real
        return self.head(h)


class Summing(nn.Module):
    """einsum, index_add, scatter_add, gather and index_put, as graph networks write them."""

    source: Tensor
    target: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.message, self.mix = nn.Linear(10, 16), nn.Parameter(torch.randn(4, 4, 6) * 0.4)
        self.register_buffer("source", torch.tensor([0, 1, 2, 3, 4, 5, 2]))
        self.register_buffer("target", torch.tensor([1, 2, 3, 4, 5, 0, 0]))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.message(x))
        sent = h.index_select(1, self.source)
        received = torch.zeros_like(h).index_add(1, self.target, sent)
        index = self.target.view(1, -1, 1).expand(x.shape[0], -1, 16)
        received = received + torch.zeros_like(h).scatter_add_(1, index, 0.5 * sent)
        received = received + h.gather(1, self.source[:6].view(1, -1, 1).expand(x.shape[0], -1, 16))
        a, b = received.unflatten(-1, (4, 4)), h.unflatten(-1, (4, 4))
        return torch.einsum("bnij,bnkj,ikc->bnc", a, b, self.mix)


SCRIPTS: Mapping[str, Script] = MappingProxyType(
    {
        "gan": gan(),
        "two-losses": two_losses(),
        "cnn": classified(Convolutional, ROWS, 3, 8, 8),
        "lstm": classified(lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), ROWS, 5, 10),
        "gru": classified(lambda: Recurrent(nn.GRU, bidirectional=True), ROWS, 5, 10),
        "rnn": classified(lambda: Recurrent(nn.RNN), ROWS, 5, 10),
        "cell-loop": classified(CellLoop, ROWS, 5, 10),
        "own-function": classified(OwnFunction, ROWS, 10),
        "branching": classified(Branching, ROWS, 5, 10),
        "remembering": classified(Remembering, ROWS, 10),
        "parametrized": classified(parametrized, ROWS, 10),
        "attending": classified(Attending, ROWS, 6, 16),
        "encoder": classified(encoder, ROWS, 6, 16),
        "spectral": classified(Spectral, ROWS, 8, 16),
        "summing": classified(Summing, ROWS, 6, 10),
    }
)
