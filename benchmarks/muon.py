"""Muon's step against one device alone, and against gathering by hand: on real ranks.

    python benchmarks/muon.py [--ranks 2] [--hidden 512] [--layers 4] [--rounds 9] [--only zero2,dp]

By hand: what a script of stock torch does. Momentum in shards, each update gathered by all ranks (`all_gather_single`), and
orthogonalised on every rank. Ours and it take turns, one step each, in the same processes, on the same gradients; the ratio is
of such pairs. One device steps alone, in a process of its own, while nothing else runs. On fewer cores than ranks, ranks wait for
each other's processor, so the processor seconds of the rank that has most of them are there too, as a part of one device's.

"whole": each matrix is on one rank of zero, as `mw.plan(optimizer="muon")` has it, so that its gradient is reduced to that rank.
What a step saves may be paid before it, so these rows also have forward, backward and step against those of chunks, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from taking_turns import timed_pairs
from torch import Tensor, nn
from torch.optim import _muon

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.sharding.balance import least_loaded, orthogonalization_cost
from meshwright_dtensor.testing.rank_pool import RankPool

LAYOUTS = (
    "dp",
    "zero1",
    "zero2",
    "zero3",
    "zero1 whole",
    "zero2 whole",
    "zero3 whole",
    "tp2 x zero2",
    "tp2 x zero2 whole",
)


class Net(nn.Module):
    """The matrices of transformer layers."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        for layer in range(layers):
            for name, (m, n) in {
                "q": (1, 1),
                "k": (1, 1),
                "v": (1, 1),
                "o": (1, 1),
                "up": (4, 1),
                "down": (1, 4),
            }.items():
                weight = nn.Parameter(torch.randn(m * hidden, n * hidden) / hidden**0.5)
                self.register_parameter(f"{name}_{layer}", weight)

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(p * scale).sum() for p in self.parameters()]).sum()


def plan_of(layout: str, ranks: int, layers: int) -> ParallelPlan:
    if layout == "dp":
        return ParallelPlan(world_size=ranks, degrees={"dp": ranks})
    owners = {}
    if layout.endswith("whole"):
        shapes = {name: p.shape for name, p in Net(4, layers).named_parameters()}
        places = least_loaded(
            [orthogonalization_cost(s) for s in shapes.values()], ranks // (2 if "x" in layout else 1)
        )
        owners = dict(zip(shapes, places, strict=True))
    layout = layout.removesuffix(" whole")
    zero = {"stage": int(layout[-1]), "owners": owners}
    if "x" not in layout:
        return ParallelPlan(world_size=ranks, degrees={"zero": ranks}, zero=zero)
    rules = [ParameterRule(pattern=f"{n}_*", placement={"tp": "S(0)"}) for n in ("q", "k", "v", "up")]
    rules += [ParameterRule(pattern=f"{n}_*", placement={"tp": "S(1)"}) for n in ("o", "down")]
    return ParallelPlan(
        world_size=ranks, degrees={"zero": ranks // 2, "tp": 2}, zero=zero, parameters=tuple(rules)
    )


def gradients(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def alone(rank: int, size: int, hidden: int, layers: int, rounds: int) -> list[float]:
    torch.manual_seed(0)
    net = Net(hidden, layers)
    gradients(net)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.02)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def ours(layout: str, ranks: int, hidden: int, layers: int) -> Callable[[], None]:
    from meshwright_parallel import parallelize

    torch.manual_seed(0)
    net: Any = parallelize(Net(hidden, layers), plan_of(layout, ranks, layers))
    gradients(net)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.02)

    def step() -> None:
        optimizer.step()

    return step


def training_step(layout: str, ranks: int, hidden: int, layers: int) -> Callable[[], None]:
    """Forward, backward and step of ours."""
    from meshwright_parallel import parallelize

    torch.manual_seed(0)
    net: Any = parallelize(Net(hidden, layers), plan_of(layout, ranks, layers))
    optimizer = torch.optim.Muon(net.parameters(), lr=0.02)
    scale = torch.tensor(1.0)

    def step() -> None:
        net(scale).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def against_chunks(rank: int, ranks: int, layout: str, hidden: int, layers: int, rounds: int) -> Any:
    steps = [training_step(name, ranks, hidden, layers) for name in (layout, layout.removesuffix(" whole"))]
    for step in steps:
        step()
    return timed_pairs(steps, rounds)


def by_hand(layout: str, ranks: int, hidden: int, layers: int) -> Callable[[], None]:
    """Shards of rows of all ranks (under dp: whole matrices, and nothing to gather)."""
    torch.manual_seed(0)
    net, rank, shards = Net(hidden, layers), dist.get_rank(), 1 if layout == "dp" else ranks
    gradients(net)
    # mine, gradient, momentum
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for p in net.parameters():
        place = rank if shards > 1 else 0
        mine, grad = (x.detach().chunk(shards)[place].clone() for x in (p, p.grad))
        parts.append((mine, grad, torch.zeros_like(grad)))

    @torch.no_grad()
    def step() -> None:
        for mine, grad, momentum in parts:
            momentum.lerp_(grad, 0.05)
            update = grad.lerp(momentum, 0.95).bfloat16()
            whole = update
            if shards > 1:
                whole = update.new_empty(update.shape[0] * shards, update.shape[1])
                dist.all_gather_single(whole, update)
            shape = whole.shape
            whole = _muon._zeropower_via_newtonschulz(whole, (3.4445, -4.775, 2.0315), 5, 1e-7)
            orthogonal = whole.chunk(shards)[rank if shards > 1 else 0]
            mine.mul_(1 - 0.02 * 0.1)
            mine.add_(orthogonal, alpha=-_muon._adjust_lr(0.02, None, shape))

    return step


def against_hand(rank: int, ranks: int, layout: str, hidden: int, layers: int, rounds: int) -> Any:
    """Pairs of seconds; processor seconds of a step of ours; seconds of its communication alone; its bytes."""
    steps = [f(layout, ranks, hidden, layers) for f in (ours, by_hand)]
    for step in steps:
        step()
    with communication() as log:
        steps[0]()
    pairs = timed_pairs(steps, rounds)
    processor = []
    for _ in range(3):
        dist.barrier()
        start = time.process_time()
        steps[0]()
        processor.append(time.process_time() - start)
    inner = _muon._zeropower_via_newtonschulz
    # the same step without what is computed on whole matrices
    _muon._zeropower_via_newtonschulz = lambda whole, *_: (
        whole.T.contiguous().T if whole.shape[0] > whole.shape[1] else whole
    )
    rest = [seconds for seconds, _ in timed_pairs([steps[0], lambda: None], 5)]
    _muon._zeropower_via_newtonschulz = inner
    return pairs, statistics.median(processor), statistics.median(rest), sum(log.nbytes().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    layouts = [n for n in LAYOUTS if n in options.only.split(",") or not options.only]
    sizes = (options.hidden, options.layers, options.rounds)
    print(f"{options.ranks} ranks, {options.layers} layers of hidden size {options.hidden}")
    print(
        "| layout | step / one device | not orthogonalising | step / by hand | processor of a rank / one device | MB received "
        "| training step / chunks |"
    )
    print("|---|---|---|---|---|---|---|")
    for layout in layouts:
        if "tp2" in layout and options.ranks % 4:
            continue
        with RankPool() as pool:
            one_device = pool.run(1, alone, *sizes)[0]
            results = pool.run(options.ranks, against_hand, layout, *sizes, timeout=1200)
            chunks = []
            if layout.endswith("whole"):
                chunks = pool.run(options.ranks, against_chunks, layout, *sizes, timeout=1200)[0]
        base = statistics.median(one_device)
        pairs = results[0][0]
        steps = sorted(a / base for a, _ in pairs)
        ratios = sorted(a / b for a, b in pairs)
        trained = sorted(a / b for a, b in chunks)
        texts = [
            f"{statistics.median(x):.2f} ({x[0]:.2f} to {x[-1]:.2f})" if x else ""
            for x in (steps, ratios, trained)
        ]
        processor, rest = max(r[1] for r in results) / base, results[0][2] / base
        megabytes = max(r[3] for r in results) / 1e6
        print(
            f"| {layout} | {texts[0]} | {rest:.2f} | {texts[1]} | {processor:.2f} | {megabytes:.1f} | "
            f"{texts[2]} |",
            flush=True,
        )
    print(f"one device: {base * 1e3:.0f} ms ({min(one_device) * 1e3:.0f} to {max(one_device) * 1e3:.0f})")


if __name__ == "__main__":
    main()
