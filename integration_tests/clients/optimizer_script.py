"""A user of other packages' optimizers, whose states are quantized or averaged, in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .plans import plan_of

STEPS = 3
TOLERANCES = {
    "torchao.AdamW8bit": 5e-3,
    "torchao.AdamW4bit": 5e-2,
    "torchao.AdamWFp8": 5e-3,
    "torchao.float8": 5e-3,
    "bitsandbytes.AdamW8bit": 5e-4,
    "schedulefree.AdamWScheduleFree": 1e-5,
}
"""Optimizers, and how far numbers may be from one device: gradients differ in their last bits, and so do rounded states."""


class Net(nn.Module):
    """Matrices large enough that optimizers quantize their states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
            for _ in range(2)
        )
        self.head = nn.Linear(128, 128, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def converted(name: str) -> nn.Module:
    net = Net()
    if name == "torchao.float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # CPUs have no float8 products
        convert_to_float8_training(net, config=Float8LinearConfig(emulate=True))
    return net


def make(name: str, parameters: Any) -> Any:
    package, _, cls = name.partition(".")
    if cls == "float8":
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)
    if package == "torchao":
        import torchao.optim

        return getattr(torchao.optim, cls)(parameters, lr=1e-2)
    if package == "bitsandbytes":
        import bitsandbytes.optim

        return getattr(bitsandbytes.optim, cls)(parameters, lr=1e-2)
    import schedulefree

    return getattr(schedulefree, cls)(parameters, lr=1e-2, warmup_steps=2)


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(128, (count, 4, 8), generator=generator)
    return [{"ids": rows, "labels": rows.roll(1, 1)} for rows in ids]


def script(
    name: str, make_parallel: Callable[..., nn.Module], clip: Any, save: Callable[..., Any], load: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    data = batches(2 * STEPS)
    net = make_parallel(converted(name), data[0])
    optimizer = make(name, net.parameters())
    begin = load(net, optimizer)
    losses, norms = [], []
    for step, batch in enumerate(data):
        if step < begin:
            continue
        if step == STEPS and not begin:
            save(net, optimizer)
        if hasattr(optimizer, "train"):
            optimizer.train()
        loss = net(**batch)
        loss.backward()
        norms.append(float(clip(net.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    with torch.no_grad():
        losses.append(net(**data[0]).item())
    return {"losses": losses, "norms": norms}


def one_device(name: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    # torchao compiles its step for each shape: minutes
    with torch.compiler.set_stance("force_eager"):
        return script(name, lambda net, batch: net, nn.utils.clip_grad_norm_, lambda *_: None, lambda *_: 0)


def on_rank(
    rank: int, size: int, plan: str, name: str, folder: Path, resume: Path | None = None
) -> dict[str, Any]:
    """The same with the lines that make it parallel."""
    import meshwright as mw

    def save(net: nn.Module, optimizer: Any) -> None:
        mw.save(folder / "state", model=net, optimizer=optimizer).wait()

    def load(net: nn.Module, optimizer: Any) -> int:
        if resume is None:
            return 0
        mw.load(resume / "state", model=net, optimizer=optimizer)
        return STEPS

    def make_parallel(net: nn.Module, batch: Any) -> nn.Module:
        return mw.auto_parallelize(net, batch, **plan_of(plan, size))

    with torch.compiler.set_stance("force_eager"):
        return script(name, make_parallel, mw.clip_grad_norm_, save, load)
