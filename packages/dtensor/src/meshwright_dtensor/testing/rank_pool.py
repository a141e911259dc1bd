"""Real ranks for tests: a pool of processes that outlives the single test, and a process group that only
pretends.

Starting a rank costs seconds (it imports torch), using one costs milliseconds: a `RankPool` starts each rank
once, on first need, and keeps it for the whole test session. Rank 0 is started from nothing; the others are
forked from one server that has imported torch. So a world has two hash seeds (if PYTHONHASHSEED names none): an
order of collectives that depends on one still shows. Functions travel by name, so they must be top-level ones:

    def summed(rank, world_size, value):
        tensor = torch.full((), float(value + rank))
        dist.all_reduce(tensor)
        return tensor.item()

    def test_sum(rank_pool):
        assert rank_pool.run(4, summed, 1) == [10.0] * 4
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright_dtensor._torch.core import fake_store
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.testing.rank_worker import Outcome, run_worker

MAX_RANKS = 8
DEFAULT_TIMEOUT = 300.0
WORKER = "meshwright_dtensor.testing.rank_worker"
JOIN_ATTEMPTS = 3
"""How often a world is made before its failure is told: gloo drops a connection once in tens of thousands of worlds."""
RUNS_PER_WORLD = 8
"""After so many runs a world is made anew: nothing else ends the process groups that its runs have made."""


class RankError(MeshwrightError):
    """What went wrong on a rank, told in the parent: the rank, and its own traceback or the way it died."""


@dataclass
class _Rank:
    process: BaseProcess
    pipe: Connection


class RankPool:
    """Processes that act as the ranks of a gloo world on this machine; they meet through a file, so no port
    is used.

    Use it as a context manager, or call `close`. Not thread-safe: one `run` at a time.
    """

    def __init__(self, max_ranks: int = MAX_RANKS, grace: float = 10.0, preload: Sequence[str] = ()) -> None:
        """`max_ranks`: the largest world allowed. `grace`: seconds other ranks get to end once one has
        failed. `preload`: modules that ranks but the first are forked with; those of the pool of a process that forks
        the first of them, since all are forked from one server.
        """
        self._max_ranks = max_ranks
        self._grace = grace
        self._ranks: list[_Rank] = []
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-ranks-"))
        self._meetings = 0
        self._world_size: int | None = None
        self._runs = 0
        self._first = multiprocessing.get_context("spawn")
        self._others: SpawnContext | ForkServerContext = self._first
        self._preload = [WORKER, *preload]
        if "forkserver" in multiprocessing.get_all_start_methods():
            self._others = multiprocessing.get_context("forkserver")

    def run(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> list[Any]:
        """Run `fn(rank, world_size, *args)` on ranks 0..world_size-1 and return their results in rank order.

        `fn` is a top-level function; arguments and results are pickled (tensors are copied). Before each call
        every rank seeds `random` and torch with 0, on one thread, with a default process group of exactly
        `world_size` ranks. Raises the exception of the rank that failed first, its `__cause__` a `RankError`
        with rank and traceback; raises `RankError` when a rank died or `timeout` seconds have passed, and
        starts afresh on the next call. A world that does not come about, so that `fn` has run nowhere, is made
        anew, up to `JOIN_ATTEMPTS` times in all.
        """
        if not 1 <= world_size <= self._max_ranks:
            raise UsageError(
                f"world_size={world_size} is outside 1..{self._max_ranks}, the ranks of this pool; "
                f"use a world in that range or RankPool(max_ranks={world_size})"
            )
        _check_by_name(fn)
        payload = pickle.dumps((fn, args))  # plain pickle: tensors by value, no shared memory to leak
        for _ in range(JOIN_ATTEMPTS):
            self._send(world_size, fn, payload)
            outcomes = self._collect(world_size, fn.__qualname__, timeout)
            if all(outcome.joined for outcome in outcomes):
                break
            self._kill()
        failed = [(outcome, index) for index, outcome in enumerate(outcomes) if outcome.traceback]
        if failed:
            self._world_size = None  # a failed world is never used again: its groups may be out of step
            outcome, index = min(failed, key=lambda pair: pair[0].finished)
            where = fn.__qualname__ if outcome.joined else f"joining the others, {JOIN_ATTEMPTS} times"
            cause = RankError(f"rank {index} of {world_size} failed in {where}:\n{outcome.traceback}")
            if outcome.exception is None:
                raise cause
            raise pickle.loads(outcome.exception) from cause
        return [pickle.loads(outcome.result) for outcome in outcomes]

    def close(self) -> None:
        """End every rank and remove the pool's files; the pool can be used again only for `close`."""
        for rank in self._ranks:
            rank.pipe.close()  # the worker reads end of file and leaves
        deadline = time.monotonic() + 1.0
        for rank in self._ranks:
            rank.process.join(max(deadline - time.monotonic(), 0.0))
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _meet(self, world_size: int) -> str:
        """Start missing ranks; return the file where this world meets (a new one for each new process group)."""
        dead = [rank for rank in self._ranks if not rank.process.is_alive()]
        if dead:
            self._kill()
        for index in range(len(self._ranks), world_size):
            context = self._others if index else self._first
            if isinstance(context, ForkServerContext):  # a server that runs already takes no note of it
                context.set_forkserver_preload(self._preload)
            here, there = context.Pipe()
            process = context.Process(
                target=run_worker,
                args=(index, there, str(self._folder), dict(os.environ)),
                name=f"rank-{index}",
                daemon=True,
            )
            process.start()
            there.close()
            self._ranks.append(_Rank(process, here))
        if self._world_size != world_size or self._runs >= RUNS_PER_WORLD:
            self._world_size = world_size
            self._meetings += 1
            self._runs = 0
        self._runs += 1
        return str(self._folder / f"meet-{self._meetings}")

    def _send(self, world_size: int, fn: Callable[..., Any], payload: bytes) -> None:
        meeting = self._meet(world_size)
        job = (list(sys.path), _source_of(fn), world_size, meeting, payload)
        for index, rank in enumerate(self._ranks[:world_size]):
            try:
                rank.pipe.send(job)
            except OSError as error:  # it died between two runs
                how = _death(rank.process)
                message = f"rank {index} of {world_size} was dead before {fn.__qualname__} began ({how})"
                self._kill()
                raise RankError(message) from error

    def _collect(self, world_size: int, name: str, timeout: float) -> list[Outcome]:
        ranks = self._ranks[:world_size]
        outcomes: dict[int, Outcome] = {}
        deaths: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) + len(deaths) < world_size:
            missing = [index for index in range(world_size) if index not in outcomes and index not in deaths]
            left = deadline - time.monotonic()
            ready = wait([ranks[index].pipe for index in missing], timeout=max(left, 0.0))
            if not ready:
                break
            for index in missing:
                if ranks[index].pipe not in ready:
                    continue
                try:
                    outcomes[index] = ranks[index].pipe.recv()
                except (EOFError, OSError):
                    ranks[index].process.join(1.0)
                    deaths[index] = _death(ranks[index].process)
                if index in deaths or outcomes[index].traceback:  # the rest may wait for it for ever
                    deadline = min(deadline, time.monotonic() + self._grace)
        missing = [index for index in range(world_size) if index not in outcomes and index not in deaths]
        failed = [(outcome.finished, index) for index, outcome in outcomes.items() if outcome.traceback]
        if not missing and not deaths:
            return [outcomes[index] for index in range(world_size)]
        stacks = "".join(self._stack(index) for index in missing)
        self._kill()
        if deaths:
            how = ", ".join(f"rank {index} ({text})" for index, text in sorted(deaths.items()))
            raise RankError(f"{how} of {world_size} died in {name}; what it printed is on stderr")
        if failed:  # report the failure, not those that waited for the failed rank
            return [outcomes.get(index) or Outcome.none() for index in range(world_size)]
        raise RankError(
            f"rank {', '.join(map(str, missing))} of {world_size} did not finish {name} within {timeout:g} s "
            f"(a collective that some ranks never reach?); stacks:\n{stacks}"
        )

    def _stack(self, index: int) -> str:
        """The Python stack of a rank that hangs, asked for by signal; empty if it cannot answer."""
        process = self._ranks[index].process
        path = self._folder / f"stack-{process.pid}"
        with suppress(OSError, ValueError):
            if process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.2)
                return f"rank {index}:\n{path.read_text()}"
        return ""

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.pipe.close()
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
        self._ranks = []
        self._world_size = None


def _check_by_name(fn: Callable[..., Any]) -> None:
    qualname = getattr(fn, "__qualname__", None)
    if qualname is None or "<" in qualname or "." in qualname:
        raise UsageError(
            f"{fn!r} cannot travel to another process: a rank function must be a top-level one of a module; "
            "move it there and give it what it needs as arguments"
        )


def _source_of(fn: Callable[..., Any]) -> tuple[str, str | None]:
    """Name and file of the module of `fn`: test modules are often not importable by name."""
    module = sys.modules.get(fn.__module__)
    return fn.__module__, getattr(module, "__file__", None)


def _death(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of `world_size` in this one process, seen from `rank`: collectives do nothing
    at all.

    For checks of layouts, shapes and plans, not of values. Raises UsageError if a default group exists
    already.
    """
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank={rank} is outside 0..{world_size - 1}, the ranks of world_size={world_size}; use one of them"
        )
    if dist.is_initialized():
        raise UsageError(
            f"a default process group of {dist.get_world_size()} ranks exists; fake_group needs none: "
            "call torch.distributed.destroy_process_group() first"
        )
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
