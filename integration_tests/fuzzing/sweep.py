"""Reads many changed inputs of a format, in bounded memory; an error must be one of ours."""

from __future__ import annotations

import random
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshwright_dtensor.errors import MeshwrightError

from .formats import Format

SECONDS = 5.0
"""An input that takes longer hangs."""
MEMORY = 1 << 30
"""Bytes of address space that reading may take more than the process has."""


@dataclass
class Outcome:
    """What reading gave. `wrong`: kind of a failure -> how often, and the first input with its trace."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, tuple[int, bytes, str]] = field(default_factory=dict)
    slowest: float = 0.0


def fuzz(form: Format, inputs: int, seed: int) -> Outcome:
    """Read the right inputs and so many changed ones."""
    outcome, choose = Outcome(), random.Random(seed)
    for data in form.right:
        form.read(data)
    with warnings.catch_warnings(), bounded_memory():
        warnings.simplefilter("ignore")
        for _ in range(inputs):
            _one(form, form.changed(choose), outcome)
    return outcome


def _one(form: Format, data: bytes, outcome: Outcome) -> None:
    start, kind, trace = time.process_time(), "read", ""
    try:
        form.read(data)
    except MeshwrightError:
        kind = "refused"
    except Exception as error:
        # of what they hold there may be no memory left
        traceback.clear_frames(error.__traceback__)
        kind, trace = f"{type(error).__name__}: {str(error)[:60]}", traceback.format_exc()
    took = time.process_time() - start
    outcome.slowest = max(outcome.slowest, took)
    if took > SECONDS:
        kind, trace = "slow", f"{took:.1f} s"
    outcome.counts[kind] += 1
    if trace:
        count, first, told = outcome.wrong.get(kind, (0, data, trace))
        outcome.wrong[kind] = (count + 1, first, told)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Inside, the process cannot take more than `MEMORY` bytes of address space in addition to its own."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
