"""A user of Lightning Fabric trains a model: clipping, mixed precision, a shuffled loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from .accelerate_script import ROWS, model, samples
from .plans import plan_of

PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed"}


def script(fabric: Any, make_parallel: Callable[[nn.Module, Any], nn.Module]) -> dict[str, Any]:
    torch.manual_seed(1)
    loader = DataLoader(samples(12, seed=2), batch_size=ROWS, shuffle=True)
    net = make_parallel(model(), next(iter(DataLoader(samples(4, seed=3), batch_size=ROWS))))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    net, optimizer = fabric.setup(net, optimizer)
    losses, norms = [], []
    for batch in fabric.setup_dataloaders(loader):
        loss = net(**batch).loss
        fabric.backward(loss)
        norms.append(float(fabric.clip_gradients(net, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}


def one_device(precision: str, folder: Path) -> dict[str, Any]:
    """The script as its user wrote it, on one device."""
    return script(
        Fabric(accelerator="cpu", devices=1, precision=PRECISIONS[precision]), lambda net, batch: net
    )


def on_rank(rank: int, size: int, plan: str, precision: str, folder: Path) -> dict[str, Any]:
    """The same with the lines that make it parallel."""
    import meshwright as mw

    fabric = Fabric(strategy=SingleDeviceStrategy(mw.init()), precision=PRECISIONS[precision])
    return script(fabric, lambda net, batch: mw.auto_parallelize(net, batch, **plan_of(plan, size)))
