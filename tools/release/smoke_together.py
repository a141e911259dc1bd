"""Runs inside of a fresh environment with all packages: plan, train, save and load on two ranks, compared with one device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import meshwright as mw
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.testing.rank_pool import RankPool

DEGREES = ({"dp": 2}, {"tp": 2}, {"zero": 3}, {"pp": 2})


class Model(nn.Module):
    """Four blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def model() -> nn.Module:
    """The model with weights of one seed."""
    torch.manual_seed(0)
    return Model()


def batch() -> torch.Tensor:
    """Four rows."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def trained(rank: int, world_size: int, pins: dict[str, int], folder: str) -> str:
    """What differs from one device: "" if nothing does."""
    plan = mw.plan(model(), batch(), cluster="laptop-cpu", **pins)  # type: ignore[arg-type]
    assert isinstance(plan, mw.ParallelPlan)
    report = mw.verify(model, batch(), plan, steps=2, optimizer=torch.optim.AdamW)  # type: ignore[arg-type]
    if not report.ok:
        return report.render()
    parallel = mw.parallelize(model(), plan)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(batch()).backward()
    optimizer.step()
    path = Path(folder) / "-".join(pins)
    mw.save(path, model=parallel, optimizer=optimizer).wait()
    whole = model()
    mw.load(path, model=whole)
    expected = mw.full_state_dict(parallel, everywhere=True)
    wrong = [name for name, value in whole.state_dict().items() if not torch.equal(value, expected[name])]
    return f"{pins}: loaded values of {wrong} differ" if wrong else ""


def main() -> None:
    problems = discover().problems
    assert not problems, "\n".join(map(str, problems))
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for pins in DEGREES:
            for text in pool.run(2, trained, pins, folder):
                assert not text, text
    print(f"planned, trained, saved and loaded on two ranks: {', '.join(next(iter(d)) for d in DEGREES)}")


if __name__ == "__main__":
    main()
