"""The work of a training step: calls of functions, collectives and their bytes, processor time of threads.

Two sides that do the same arithmetic differ in these, and they say where the rest of a ratio comes from: work of Python, more
communication, or waiting.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
"""Of operations of torch.distributed, in place and in functional form."""
NO_TRAFFIC = frozenset(
    {"barrier", "monitored_barrier_", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd"}
)
"""Operations of torch.distributed that carry nothing of their own: what is received was sent by another rank."""


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Calls of functions so far, of Python and of C, in the only entry of a list."""
    count = [0]

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            count[0] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield count
    finally:
        sys.setprofile(before)


class CountedCollectives(TorchDispatchMode):
    """Counts the collectives of this thread, whoever calls them, and the bytes of the tensors that are given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # first into operations on local tensors, its collectives among them
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func._schema.name.rpartition("::")
        result = func(*args, **(kwargs or {}))
        if name[0] in NAMESPACES and name[2] not in NO_TRAFFIC:
            self.count += 1
            # the output is as large, or as large times the number of ranks
            given = (tree_leaves(value) for value in (*args[:2], result))
            self.nbytes += max(
                sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor)) for leaves in given
            )
        return result


@dataclass
class Work:
    """Of one side's step on one rank, or the mean over ranks.

    Attributes:
        calls: of functions, of Python and of C, in the thread that trains.
        collectives: number of them and of messages. `nbytes`: of the larger of the tensors that each takes and gives.
        thread: processor seconds of the thread that trains, of each step.
        others: those of the other threads of the process, which send and receive.
        waited: seconds of each step in which the thread that trains did not run.
    """

    calls: float = 0
    collectives: float = 0
    nbytes: float = 0
    thread: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def timed(self, step: Callable[[], object]) -> None:
        """Run a step, and add its times."""
        wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        step()
        thread = time.thread_time() - thread
        self.others.append(max(0.0, time.process_time() - process - thread))
        self.waited.append(max(0.0, time.perf_counter() - wall - thread))
        self.thread.append(thread)

    def counted(self, step: Callable[[], object]) -> None:
        """Run two steps, and count what they do."""
        with counted_calls() as calls:
            step()
        self.calls = calls[0]
        with CountedCollectives() as seen:
            step()
        self.collectives, self.nbytes = seen.count, seen.nbytes


def over_ranks(works: Sequence[Work]) -> Work:
    """The means over ranks, step by step."""

    def mean(name: str) -> list[float]:
        return [
            statistics.mean(of_ranks) for of_ranks in zip(*(getattr(w, name) for w in works), strict=True)
        ]

    numbers = {
        name: statistics.mean(getattr(w, name) for w in works) for name in ("calls", "collectives", "nbytes")
    }
    return Work(**numbers, **{name: mean(name) for name in ("thread", "others", "waited")})
