"""What a check of replicas costs, in steps: GPT-2 with AdamW under dp2, where every value is on both ranks.

    python benchmarks/check_replicas.py [--rounds 9]

A check and a step take turns in the same processes. Printed is the median of the ratios of such pairs, with the least and the
largest; checked every 100 steps, a run is longer by a hundredth of it.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from taking_turns import timed_pairs
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

EVERY = 100


def times(rank: int, ranks: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of a check and of a step, in turn."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8000, n_embd=512, n_layer=6, n_head=8, n_positions=128))
    ids = torch.randint(8000, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    model = mw.auto_parallelize(model, batch, dp=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    def check() -> None:
        mw.check_replicas(model, optimizer)

    step(), step(), check()
    return timed_pairs((check, step), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    with RankPool() as pool:
        timed = pool.run(2, times, parser.parse_args().rounds, timeout=600)[0]
    ratios = sorted(check / step for check, step in timed)
    seconds = [statistics.median(column) for column in zip(*timed, strict=True)]
    print(
        f"a check {1e3 * seconds[0]:.0f} ms, a step {1e3 * seconds[1]:.0f} ms: {statistics.median(ratios):.3f} of a step "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}), so {statistics.median(ratios) / EVERY:.3%} of a run at every {EVERY} steps"
    )


if __name__ == "__main__":
    main()
