"""Real ranks for tests: a pool of processes for a whole test session, and a fake process group.

Starting a rank takes seconds (it imports torch), using it milliseconds. A `RankPool` starts each rank once, on first use.
Rank 0 is spawned; the others are forked from one server that has imported torch. So a world has two hash seeds (unless
PYTHONHASHSEED is set), and an order of collectives that depends on the seed still fails. Functions are sent by name, so they
must be top-level:

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

from meshwright_dtensor._torch.groups import fake_store
from meshwright_dtensor.errors import MeshwrightError, UsageError
from meshwright_dtensor.testing.on_device import backend_for, device_type, fake_backend_for, pickled
from meshwright_dtensor.testing.rank_worker import Outcome, run_worker

MAX_RANKS = 8
DEFAULT_TIMEOUT = 300.0
WORKER = "meshwright_dtensor.testing.rank_worker"
JOIN_ATTEMPTS = 3
"""Attempts to create a world: gloo drops a connection once in tens of thousands of worlds."""


class RankError(MeshwrightError):
    """A failure on a rank, raised in the parent: the rank, and its traceback or exit code."""


@dataclass
class _Rank:
    process: BaseProcess
    pipe: Connection


class RankPool:
    """Processes that act as the ranks of a world on this machine; the rendezvous is a file, so no port is used.

    Use it as a context manager, or call `close`. Not thread-safe: one `run` at a time.
    """

    def __init__(
        self,
        max_ranks: int = MAX_RANKS,
        grace: float = 10.0,
        preload: Sequence[str] = (),
        backend: str | None = None,
        device: str = "cpu",
    ) -> None:
        """`max_ranks`: the largest world allowed. `grace`: seconds for the other ranks to end once one has failed.
        `preload`: modules that the fork server imports; only the first pool of a process that forks decides.
        `backend`: of torch.distributed, such as "cpu:gloo,cuda:nccl"; by default one for which ranks may share a device.
        NCCL's ranks may be more than the GPUs. `device`: the type on which the ranks make tensors without a device.
        """
        self.backend = backend_for(device) if backend is None else backend
        self._device = device
        self._max_ranks = max_ranks
        self._grace = grace
        self._ranks: list[_Rank] = []
        self._folder = Path(tempfile.mkdtemp(prefix="meshwright-ranks-"))
        self._worlds = 0
        self._world_size: int | None = None
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
        with rank and traceback; raises `RankError` when a rank died or `timeout` seconds have passed, and starts
        new ranks on the next call. If the process group cannot be created, so that `fn` has run nowhere, it is
        tried up to `JOIN_ATTEMPTS` times.
        """
        if not 1 <= world_size <= self._max_ranks:
            raise UsageError(
                f"world_size={world_size} is outside 1..{self._max_ranks}, the ranks of this pool; "
                f"use a world in that range or RankPool(max_ranks={world_size})"
            )
        qualname = getattr(fn, "__qualname__", None)
        if qualname is None or "<" in qualname or "." in qualname:
            raise UsageError(
                f"{fn!r} cannot be sent to another process: a rank function must be a top-level function of a module; "
                "move it there and pass its data as arguments"
            )
        # tensors by value, no shared memory to leak
        payload = pickled((fn, args))
        for _ in range(JOIN_ATTEMPTS):
            self._send(world_size, fn, payload)
            outcomes = self._collect(world_size, fn.__qualname__, timeout)
            if all(outcome.joined for outcome in outcomes):
                break
            self._kill()
        failed = [(outcome, index) for index, outcome in enumerate(outcomes) if outcome.traceback]
        if failed:
            # a failed world is not used again: its groups may be out of sync
            self._world_size = None
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
            # the worker reads end of file and exits
            rank.pipe.close()
        deadline = time.monotonic() + 1.0
        for rank in self._ranks:
            rank.process.join(max(deadline - time.monotonic(), 0.0))
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _rendezvous(self, world_size: int) -> str:
        """Start missing ranks; return the rendezvous file of this world (a new one for each new process group)."""
        if not all(rank.process.is_alive() for rank in self._ranks):
            self._kill()
        for index in range(len(self._ranks), world_size):
            context = self._others if index else self._first
            # ignored by a running server
            if isinstance(context, ForkServerContext):
                context.set_forkserver_preload(self._preload)
            pipe, worker_pipe = context.Pipe()
            process = context.Process(
                target=run_worker,
                args=(index, worker_pipe, str(self._folder), dict(os.environ), self.backend, self._device),
                name=f"rank-{index}",
                daemon=True,
            )
            process.start()
            worker_pipe.close()
            self._ranks.append(_Rank(process, pipe))
        if self._world_size != world_size:
            self._world_size = world_size
            self._worlds += 1
        return str(self._folder / f"meet-{self._worlds}")

    def _send(self, world_size: int, fn: Callable[..., Any], payload: bytes) -> None:
        rendezvous = self._rendezvous(world_size)
        # the file too: test modules are often not importable by name
        source = fn.__module__, getattr(sys.modules.get(fn.__module__), "__file__", None)
        job = (list(sys.path), source, world_size, rendezvous, payload)
        for index, rank in enumerate(self._ranks[:world_size]):
            try:
                rank.pipe.send(job)
            except OSError as error:
                # the rank died between two runs
                how = _death(rank.process)
                message = f"rank {index} of {world_size} was dead before {fn.__qualname__} began ({how})"
                self._kill()
                raise RankError(message) from error

    def _collect(self, world_size: int, name: str, timeout: float) -> list[Outcome]:
        """The outcome of each rank. Raises RankError if a rank died or did not answer in time."""
        outcomes, deaths = self._receive(world_size, timeout)
        missing = [index for index in range(world_size) if index not in outcomes and index not in deaths]
        if not missing and not deaths:
            return [outcomes[index] for index in range(world_size)]
        stacks = "".join(self._stack(index) for index in missing)
        self._kill()
        if deaths:
            how = ", ".join(f"rank {index} ({text})" for index, text in sorted(deaths.items()))
            raise RankError(f"{how} of {world_size} died in {name}; its output is on stderr")
        # report a failure, not the ranks that waited for the failed rank
        if any(outcome.traceback for outcome in outcomes.values()):
            silent = Outcome(finished=float("inf"))
            return [outcomes.get(index, silent) for index in range(world_size)]
        raise RankError(
            f"rank {', '.join(map(str, missing))} of {world_size} did not finish {name} within {timeout:g} s "
            f"(a collective that some ranks never reach?); stacks:\n{stacks}"
        )

    def _receive(self, world_size: int, timeout: float) -> tuple[dict[int, Outcome], dict[int, str]]:
        """Outcomes and deaths by rank, as far as they arrive in time; less time once a rank has failed."""
        outcomes: dict[int, Outcome] = {}
        deaths: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = {rank.pipe: (index, rank) for index, rank in enumerate(self._ranks[:world_size])}
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                index, rank = waiting.pop(pipe)
                try:
                    outcomes[index] = pipe.recv()
                except (EOFError, OSError):
                    rank.process.join(1.0)
                    deaths[index] = _death(rank.process)
                # the rest may wait for it forever
                if index in deaths or outcomes[index].traceback:
                    deadline = min(deadline, time.monotonic() + self._grace)
        return outcomes, deaths

    def _stack(self, index: int) -> str:
        """The Python stack of a rank that hangs, requested by signal; empty without an answer."""
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


def _death(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of `world_size` ranks in this process, as `rank`: collectives do nothing.

    For checks of layouts, shapes and plans, not of values. Raises UsageError if a default group exists.
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
    # made first: the import registers the backend
    store = fake_store()
    dist.init_process_group(fake_backend_for(device_type()), store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
