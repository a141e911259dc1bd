"""One pipelined step against torch's own runtime over stages split by hand, the same schedule, in one run.

    python benchmarks/pipeline_step.py [--width 512] [--layers 8] [--microbatches 8] [--rounds 20]

Steps of the two take turns, so that both see the same noise; medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from taking_turns import timed_pairs
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline, write_trace
from meshwright_pipeline.timeline import planned

VOCABULARY, ROWS, TOKENS = 512, 16, 64
WARM_UP = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Half(nn.Module):
    """The same model, split by hand."""

    def __init__(self, model: Model, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.layers) // stages
        self.embed = model.embed if stage == 0 else None
        self.layers = model.layers[stage * each : (stage + 1) * each]
        self.head = model.head if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def race(
    rank: int, size: int, width: int, layers: int, count: int, rounds: int
) -> tuple[list[tuple[float, float]], float, float, float]:
    """Seconds of pairs of steps, ours and torch's; distance of the losses; bubble, planned and measured."""
    torch.manual_seed(0)
    ours, theirs = Model(width, layers), Model(width, layers)
    theirs.load_state_dict(ours.state_dict())
    each = layers // size
    stages = [[f"layers.{i}" for i in range(s * each, (s + 1) * each)] for s in range(size)]
    stages[0].insert(0, "embed")
    stages[-1].append("head")
    plan = ParallelPlan(
        world_size=size,
        degrees={"pp": size},
        pipeline=PipelineRule(stages=tuple(map(tuple, stages)), microbatches=count),
    )
    ours = pipeline(ours, plan)
    half = Half(theirs, rank, size)
    stage = PipelineStage(half, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=count, loss_fn=loss_of)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    losses: list[Tensor] = []

    def one() -> float:
        ours.zero_grad()
        loss = ours(ids=ids, labels=ids)
        loss.backward()
        return float(loss.detach())

    def other() -> float:
        half.zero_grad()
        losses.clear()
        if rank == 0:
            schedule.step(ids)
        elif rank == size - 1:
            schedule.step(target=ids, losses=losses)
        else:
            schedule.step()
        # what a loop that logs its loss does, and ours has done
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(total, src=size - 1)
        return total.item()

    apart = max(abs(one() - other()) for _ in range(WARM_UP))
    timed = timed_pairs((one, other), rounds)
    ours(ids=ids, labels=ids).backward()
    return timed, apart, planned(plan).bubble, write_trace(ours, "/dev/null")


def compare(ranks: int, width: int, layers: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """Seconds of pairs of steps, ours and torch's; distance of the losses; bubble, planned and measured."""
    with RankPool() as pool:
        timed, apart, bubble, measured = pool.run(
            ranks, race, width, layers, microbatches, rounds, timeout=550
        )[0]
    return {"ranks": ranks, "seconds": timed, "apart": apart, "bubble": (bubble, measured)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    result = compare(options.ranks, options.width, options.layers, options.microbatches, options.rounds)
    ours, theirs = zip(*result["seconds"], strict=True)
    ratio = statistics.median(a / b for a, b in result["seconds"])
    planned_bubble, measured = result["bubble"]
    print(
        f"ours {statistics.median(ours) * 1e3:.1f} ms, torch {statistics.median(theirs) * 1e3:.1f} ms a step; "
        f"median ratio {ratio:.3f}; losses apart {result['apart']:.1e}; "
        f"bubble planned {100 * planned_bubble:.1f}%, measured {100 * measured:.1f}%"
    )


if __name__ == "__main__":
    main()
