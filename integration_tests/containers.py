"""Models whose layers are never called themselves: dicts, lists and plain modules that only hold what the model calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS, ROWS, TOKENS, LAYERS = 16, 40, 8, 6, 4


class Mixture(nn.Module):
    """Each row goes to its two best experts; values decide shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return out.view_as(x)


class Model(nn.Module):
    """Between an embedding and a head, what `layer` makes LAYERS times; `run` says what a forward does with one."""

    def __init__(self, layer: Callable[[], Any], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.run(layer, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def _attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def dict_layer() -> nn.ModuleDict:
    """Of attention and a mixture of experts, as language models of teaching repositories write it."""
    parts = {"n1": nn.LayerNorm(WIDTH), "a": _attention(), "n2": nn.LayerNorm(WIDTH), "m": Mixture()}
    return nn.ModuleDict(parts)


def run_dict(layer: Any, x: Tensor) -> Tensor:
    """Attention and experts, each after a norm and with a residual."""
    h = layer["n1"](x)
    x = x + layer["a"](h, h, h, need_weights=False)[0]
    out: Tensor = x + layer["m"](layer["n2"](x))
    return out


def list_layer() -> nn.ModuleList:
    """A list of unlike modules."""
    return nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)])


def run_list(layer: Any, x: Tensor) -> Tensor:
    """An MLP."""
    norm, inner, outer = layer
    out: Tensor = x + outer(F.gelu(inner(norm(x))))
    return out


class Holder(nn.Module):
    """Holds modules and a parameter, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 24),
            nn.Linear(24, WIDTH),
        )
        self.drop = nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))


class Bypassed(Holder):
    """As Holder, with a forward that nobody calls."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("nobody calls this")


class SideBySide(Holder):
    """As Holder; it is called, and so is a part of it, from outside."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def run_holder(layer: Any, x: Tensor) -> Tensor:
    """An MLP with a dropout, scaled by the parameter of the layer."""
    out: Tensor = x + layer.drop(layer.outer(torch.relu(layer.inner(layer.norm(x))))) * layer.scale
    return out


def run_side_by_side(layer: Any, x: Tensor) -> Tensor:
    """Calls a part and the whole."""
    out: Tensor = layer(layer.norm(x)) * layer.scale
    return out


def raw_layer() -> nn.ModuleDict:
    """A module, and parameters that are in none that is called."""
    return nn.ModuleDict(
        {
            "inner": nn.Linear(WIDTH, WIDTH),
            "raw": nn.ParameterDict({"scale": nn.Parameter(torch.full((WIDTH,), 0.5))}),
            "shifts": nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(2)]),
        }
    )


def run_raw(layer: Any, x: Tensor) -> Tensor:
    """Computes with the raw parameters around the module."""
    first, second = layer["shifts"]
    out: Tensor = x + torch.tanh(layer["inner"](x + first)) * layer["raw"]["scale"] + second
    return out


class Listed(nn.Module):
    """Blocks in a list of Python's own, registered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = []
        for number in range(LAYERS):
            block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            setattr(self, f"block{number}", block)
            self.blocks.append(block)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Topmost(nn.Module):
    """Everything in a dict: an embedding, layers in a dict by their numbers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleDict(
            {str(i): nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for i in range(LAYERS)}
        )
        self.parts = nn.ModuleDict(
            {"embed": nn.Embedding(WORDS, WIDTH), "layers": layers, "head": nn.Linear(WIDTH, WORDS)}
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts["embed"](ids)
        for layer in self.parts["layers"].values():
            x = layer(x)
        return F.cross_entropy(self.parts["head"](x).flatten(0, 1), ids.flatten())


class Walked(nn.Module):
    """A Sequential of unlike modules, whose members the model calls itself."""

    def __init__(self, walked: bool = True) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Embedding(WORDS, WIDTH)]
        for _ in range(LAYERS):
            parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.net, self.walked = nn.Sequential(*parts, nn.Linear(WIDTH, WORDS)), walked

    def forward(self, ids: Tensor) -> Tensor:
        x: Any = ids
        if self.walked:
            for part in self.net:
                x = part(x)
        else:
            x = self.net(x)
        return F.cross_entropy(x.flatten(0, 1), ids.flatten())


def batch() -> dict[str, Tensor]:
    """Words."""
    return {"ids": torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True)
class Built:
    """A kind of layers, to be built on any rank."""

    layer: Callable[[], Any]
    run: Callable[[Any, Tensor], Tensor]

    def __call__(self) -> nn.Module:
        """The model."""
        return Model(self.layer, self.run)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dicts": Built(dict_layer, run_dict),
    "lists": Built(list_layer, run_list),
    "holders": Built(Holder, run_holder),
    "bypassed": Built(Bypassed, run_holder),
    "side by side": Built(SideBySide, run_side_by_side),
    "raw": Built(raw_layer, run_raw),
    "listed": Listed,
    "topmost": Topmost,
    "walked": Walked,
    "sequential": lambda: Walked(False),
}
