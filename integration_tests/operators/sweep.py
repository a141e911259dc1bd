"""Runs operators in chunks on real ranks; a chunk that hangs or dies is run again without the case at fault."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright_dtensor.testing.rank_pool import RankError, RankPool

from .judge import KINDS, Outcome
from .run_ops import run_ops

CHUNK, TIMEOUT = 8, 90.0
RENEWED = 12
"""After so many chunks the ranks start afresh, so that nothing piles up in them."""


def sweep(
    names: Sequence[str], sizes: tuple[int, ...], count: int, device: str = "cpu"
) -> Iterator[tuple[list[str], list[Outcome]]]:
    """Names of a chunk and its outcomes, chunk by chunk, on a mesh of `sizes`, with `count` samples of each operator.

    On `device` "cuda" the collectives are NCCL's, and all ranks may share one GPU.
    """
    world, backend = math.prod(sizes), "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        progress = str(Path(folder) / "case")
        pool = RankPool(world, backend=backend)
        try:
            for start in range(0, len(names), CHUNK):
                if start and start // CHUNK % RENEWED == 0:
                    pool.close()
                    pool = RankPool(world, backend=backend)
                chunk = list(names[start : start + CHUNK])
                yield chunk, _chunk(pool, world, chunk, sizes, count, progress, device)
        finally:
            pool.close()


def _chunk(
    pool: RankPool,
    world: int,
    names: list[str],
    sizes: tuple[int, ...],
    count: int,
    progress: str,
    device: str,
) -> list[Outcome]:
    faults: list[Outcome] = []
    while True:
        skipped = frozenset(f"{fault.op} {fault.case}" for fault in faults)
        try:
            ranks = pool.run(world, run_ops, sizes, names, count, progress, skipped, device, timeout=TIMEOUT)
            return faults + [worst(outcomes) for outcomes in zip(*ranks, strict=True)]
        except RankError as error:
            if len(names) > 1:
                # one by one: the chunk may only have been slow
                parts = (_chunk(pool, world, [name], sizes, count, progress, device) for name in names)
                return [outcome for part in parts for outcome in part]
            label = Path(progress).read_text()
            kind = "hang" if "did not finish" in str(error) else "crash"
            case = label.removeprefix(f"{names[0]} ")
            faults.append(Outcome(names[0], case, kind, " ".join(str(error).split())[:300]))
            if label in skipped:
                raise


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a case on all ranks."""
    result = max(outcomes, key=lambda outcome: KINDS.index(outcome.kind))
    return replace(result, gathered=any(o.gathered for o in outcomes), tier=max(o.tier for o in outcomes))
