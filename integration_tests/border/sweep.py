"""The cases of all plans on reused ranks; a case that hangs or kills a rank is left, and the next ones run on new ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright_dtensor.testing.rank_pool import RankError, RankPool

from .run import Outcome, run_cases
from .subjects import world_of

AT_ONCE = 200
"""Cases in one call of the ranks."""


def sweep(keys: Sequence[str], plans: Sequence[str], pool: RankPool | None = None) -> Iterator[Outcome]:
    """The outcome of every case under every plan."""
    with tempfile.TemporaryDirectory() as folder:
        made = pool or RankPool(max(map(world_of, plans)), grace=2.0)
        try:
            for plan in plans:
                for first in range(0, len(keys), AT_ONCE):
                    yield from _some(made, list(keys[first : first + AT_ONCE]), plan, Path(folder))
        finally:
            if pool is None:
                made.close()


def _some(pool: RankPool, keys: list[str], plan: str, folder: Path) -> Iterator[Outcome]:
    while keys:
        path = folder / f"{plan}-0"
        path.unlink(missing_ok=True)
        try:
            pool.run(world_of(plan), run_cases, plan, keys, str(folder), timeout=3600)
        except RankError as error:
            death = " ".join(str(error).split())
        else:
            death = ""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ended = [Outcome(**line) for line in lines if "kind" in line]
        yield from ended
        keys = keys[len(ended) :]
        if keys and not death:
            raise AssertionError(f"{keys[0]} was not run")
        if keys and "kind" not in lines[-1]:
            yield Outcome(plan, keys[0], "hang", _where(folder, plan) or death[:300])
            keys = keys[1:]


def _where(folder: Path, plan: str) -> str:
    """The innermost line of ours on the rank that was ended."""
    for rank in range(world_of(plan)):
        stack = (folder / f"{plan}-{rank}-stack").read_text().splitlines()
        ours = [line.strip() for line in stack if "meshwright" in line and "rank_" not in line]
        if stack:
            return f"rank {rank}: " + (ours or stack)[0][-160:]
    return ""
