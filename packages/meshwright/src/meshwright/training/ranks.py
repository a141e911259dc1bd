"""What the ranks of a run agree on: who reads files first, signals, the fullest memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def first_rank_first(work: Callable[[], T]) -> T:
    """What `work` returns, on every rank, after it was done on rank 0: the others find the files that it wrote."""
    first, failed = dist.get_rank() == 0, list[Exception | None]([None])
    if first:
        try:
            result = work()
        except Exception as error:
            failed = [error]
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]
    return result if first else work()


def largest(*values: float) -> tuple[int, ...]:
    """The largest of each value on all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tuple(int(value) for value in tensor.tolist())


@contextmanager
def signals() -> Iterator[Callable[[], int]]:
    """Inside, SIGINT (Ctrl-C) and SIGTERM do nothing but set what the function returns: the signal, or 0.

    A rank whose launcher was killed, and which nobody would end, has SIGTERM too.
    """
    arrived: list[int] = []
    watched, launcher = (signal.SIGINT, signal.SIGTERM), os.getppid()
    before = [signal.signal(number, lambda number, _: arrived.append(number)) for number in watched]

    def received() -> int:
        alone = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher
        return max(arrived, default=signal.SIGTERM if alone else 0)

    try:
        yield received
    finally:
        for number, handler in zip(watched, before, strict=True):
            signal.signal(number, handler)
