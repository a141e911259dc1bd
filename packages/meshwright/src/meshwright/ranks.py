"""Ranks of one command: which one this process is, starting the others with torchrun, agreeing, and failing once.

A command that runs on several ranks is started either by torchrun (the environment then holds RANK and WORLD_SIZE) or
by itself: `launch` is torchrun's own entry point, called in this process so that the ranks' exit code is not lost.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.util import register_after_fork
from typing import NoReturn, TypeVar

from meshwright_dtensor.errors import UsageError, portable
from meshwright_dtensor.utils.names import count_of

T = TypeVar("T")

MAX_LOCAL_RANKS = 64
_ENDING = (signal.SIGINT, signal.SIGTERM)


def is_rank() -> bool:
    """Whether a launcher started this process as one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """The rank of this process; 0 outside a job."""
    return int(os.environ["RANK"]) if is_rank() else 0


def world_size() -> int:
    """The number of ranks of the job that this process belongs to; 1 outside a job."""
    return int(os.environ["WORLD_SIZE"]) if is_rank() else 1


def check_world_size(requested: int | None, default: int = 1, option: str = "--world-size ") -> int:
    """The world size to run at: that of the job inside one, else what was requested. Raises UsageError where they differ.

    option: how messages write what was requested.
    """
    if is_rank():
        if requested is not None and requested != world_size():
            raise UsageError(
                f"{option}{requested} does not match this job of {count_of(world_size(), 'rank')}; "
                f"leave it out under torchrun, or start {count_of(requested, 'rank')}"
            )
        return world_size()
    size = default if requested is None else requested
    if not 1 <= size <= MAX_LOCAL_RANKS:
        possible = f"1..{MAX_LOCAL_RANKS}"
        raise UsageError(f"{option}{size} is outside {possible}; give a number of ranks in that range")
    return size


def launch(size: int, arguments: Sequence[str], module: str = "meshwright", grace: int = 30) -> int:
    """Run `python -m MODULE ARGUMENTS` on `size` ranks of this machine; return the exit code of the first that failed.

    The same as `torchrun --standalone --nproc-per-node SIZE -m meshwright ARGUMENTS`, whose own exit code is always 1.
    A signal (Ctrl-C, SIGTERM) is sent on to the ranks, which have `grace` seconds to end; the code is then 128 and the signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The launcher's report repeats what the failing rank has said in one line.
    logging.disable(logging.ERROR)
    try:
        options = [
            "--standalone",
            f"--nproc-per-node={size}",
            "--monitor-interval=0.2",
            f"--shutdown-timeout={grace}",
        ]
        run(parse_args([*options, "-m", module, *arguments]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def first_rank_first(work: Callable[[], T]) -> T:
    """What `work` returns, on every rank, after it was done on rank 0: the others find the files that it wrote."""
    import torch.distributed as dist

    first, failed = dist.get_rank() == 0, list[Exception | None]([None])
    if first:
        try:
            result = work()
        except Exception as error:
            failed = [portable(error)]
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]
    return result if first else work()


@contextmanager
def signals() -> Iterator[Callable[[], int]]:
    """Inside, SIGINT (Ctrl-C) and SIGTERM do nothing but set what the function returns: the signal, or 0.

    A rank whose launcher was killed, and which nobody would end, has SIGTERM too. Processes that are forked inside, such as the
    workers of a loader, outlast both signals on Linux: torchrun, terminals and Slurm send them to all processes of a rank. Others
    call `ignore_signals`.
    """
    arrived: list[int] = []
    watched, launcher = _ENDING, os.getppid()
    before = [signal.signal(number, lambda number, _: arrived.append(number)) for number in watched]
    # multiprocessing forgets the function with this object
    inside = _Inside()
    # not on macOS
    if hasattr(signal, "sigwaitinfo"):
        register_after_fork(inside, _outlast_signals)

    def received() -> int:
        alone = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher
        return max(arrived, default=signal.SIGTERM if alone else 0)

    try:
        yield received
    finally:
        del inside
        for number, handler in zip(watched, before, strict=True):
            signal.signal(number, handler)


def ignore_signals(worker: int) -> None:
    """As `worker_init_fn` of a loader: its worker outlasts what `signals` keeps, with any start method."""
    # in a forked worker they are blocked, and what comes still reaches its thread
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


class _Inside:
    """Exists inside of `signals`."""


def _outlast_signals(_: object) -> None:
    """End this process, which a rank has forked, at a signal of the rank only, as Process.terminate() sends it.

    The signals are blocked, since a loader's worker sets handlers of its own, which die of them.
    """
    parent, watched = os.getppid(), _ENDING
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def wait() -> None:
        while signal.sigwaitinfo(watched).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="meshwright signals", daemon=True).start()


def fail(message: str, code: int, data: str | None = None) -> NoReturn:
    """Print one line once for the whole job and end this process with `code`, without waiting for anyone.

    data: also printed, on stdout, for whoever asked for data.
    """
    if _first_to_fail():
        prefix = f"rank {rank()}: " if rank() else ""
        print(f"Error: {prefix}{message}", file=sys.stderr, flush=True)
        if data is not None:
            print(data, flush=True)
    _end(code)


def leave(code: int) -> NoReturn:
    """End this process with `code`, after what is registered to run at exit."""
    # What the interpreter takes down while gloo's threads still hold tensors aborts the process and loses the code.
    if is_rank():
        atexit._run_exitfuncs()
    _end(code)


def _end(code: int) -> NoReturn:
    """End this process; a rank without the destructors, which wait for collectives that will never finish."""
    if not is_rank():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _first_to_fail() -> bool:
    """Whether this rank is the one that reports; the others give it a moment, since the launcher ends the job."""
    if world_size() == 1:
        return True
    first = rank() == 0
    if not first:
        # what fails everywhere is rank 0's to say
        time.sleep(0.5)
    # the launcher's store is a courtesy: without it rank 0 speaks
    with suppress(Exception):
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=3))
        first = store.add(f"meshwright/failed/{attempt}", 1) == 1
    if not first:
        time.sleep(1.0)
    return first
