"""What a check of replicas costs, in processor time of a step: GPT-2 with AdamW under dp2, where every value is on both ranks.

    python benchmarks/check_replicas.py [--rounds 9]

Steps with a check before each of them and steps without take turns in the same processes, and the processor time (user and
system, of all threads) of both ranks is compared, so that other processes of the machine count nothing. Printed is the median of
the ratios of such pairs, with the least and the largest; checked every 100 steps, a run takes a hundredth of it more.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

EVERY, STEPS = 100, 2


def times(rank: int, ranks: int, rounds: int) -> list[tuple[float, float]]:
    """Processor seconds of steps with a check before each, and of as many without, in turn."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8000, n_embd=512, n_layer=6, n_head=8, n_positions=128))
    ids = torch.randint(8000, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    model = mw.auto_parallelize(model, batch, dp=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def steps(checked: bool) -> float:
        watch = mw.watch_replicas(model, optimizer, 1) if checked else None
        dist.barrier()
        start = time.process_time()
        for _ in range(STEPS):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        seconds = time.process_time() - start
        if watch is not None:
            watch.remove()
        return seconds

    # the first calls compile, compare batches and make states
    for _ in range(2):
        steps(True)
    pairs = []
    for number in range(rounds):
        seconds = {checked: steps(checked) for checked in ((True, False) if number % 2 else (False, True))}
        pairs.append((seconds[True] / STEPS, seconds[False] / STEPS))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    with RankPool() as pool:
        of_ranks = pool.run(2, times, parser.parse_args().rounds, timeout=900)
    timed = [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(*of_ranks, strict=True)]
    more = sorted(checked / plain - 1 for checked, plain in timed)
    checked, plain = (statistics.median(column) for column in zip(*timed, strict=True))
    print(
        f"processor time of both ranks: a step {1e3 * plain:.0f} ms, with a check {1e3 * checked:.0f} ms: "
        f"{statistics.median(more):.1%} more ({more[0]:.1%} to {more[-1]:.1%}), "
        f"so {statistics.median(more) / EVERY:.3%} of a run at every {EVERY} steps"
    )


if __name__ == "__main__":
    main()
