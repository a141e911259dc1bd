"""A convolutional network in channels_last against the same in contiguous memory: step time, on one device and on two ranks.

    python benchmarks/memory_format.py [--rounds 9] [--only tp2,pp2]

Both memory formats take turns, one step each, in the same processes; what is printed is the median of the ratios of such pairs
of steps, with the least and the largest. "one" is the plain model in one process, with one thread as each rank has.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from taking_turns import timed_pairs
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, CHANNELS, SIZE, CLASSES = 8, 64, 32, 10
LAYOUTS = ("one", "dp2", "tp2", "zero3", "pp2")
FORMATS = (torch.channels_last, torch.contiguous_format)


class Block(nn.Module):
    """Two convolutions with batch normalisation, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + x)


class Network(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)}


def batch_of(memory_format: torch.memory_format) -> dict[str, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator).contiguous(memory_format=memory_format)
    return {"images": images, "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


def plan_of(layout: str) -> ParallelPlan:
    """The planner's own, with these degrees; made once, on one process."""
    pins = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "zero3": {"zero": 3}, "pp2": {"pp": 2}}
    return mw.plan(Network(), batch_of(FORMATS[0]), cluster="laptop-cpu", world_size=2, **pins[layout])


def stepper(memory_format: torch.memory_format, plan: ParallelPlan | None) -> Callable[[], float]:
    """One training step in a memory format; its loss."""
    torch.manual_seed(0)
    model: nn.Module = Network().to(memory_format=memory_format)
    batch = batch_of(memory_format)
    if plan is not None:
        model = mw.parallelize(model, plan, batch=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def times(rank: int, ranks: int, rounds: int, plan: ParallelPlan | None) -> list[tuple[float, float]]:
    """Seconds of steps in channels_last and in contiguous memory, in turn."""
    steps = [stepper(memory_format, plan) for memory_format in FORMATS]
    for step in steps:
        step(), step()
    return timed_pairs(steps, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", help="comma-separated: one, dp2, tp2, zero3, pp2")
    arguments = parser.parse_args()
    for layout in arguments.only.split(",") if arguments.only else LAYOUTS:
        plan = None if layout == "one" else plan_of(layout)
        with RankPool() as pool:
            timed = pool.run(1 if plan is None else 2, times, arguments.rounds, plan, timeout=600)[0]
        ratios = sorted(a / b for a, b in timed)
        print(
            f"{layout:6s} {1e3 * statistics.median(a for a, _ in timed):6.0f} ms in channels_last, "
            f"{statistics.median(ratios):.2f} of contiguous ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
