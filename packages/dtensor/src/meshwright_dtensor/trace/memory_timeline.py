"""The memory timeline: bytes of tensors that are alive on this rank, after each operation of a step."""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import TorchDispatchMode, is_fake, pytree
from meshwright_dtensor.trace.module_stack import FRAMES, named_modules_tracked
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.html import details_html, text_html

COLUMNS = 72
LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Bytes alive after one operation: seconds since the start, and the running module, "" outside of a forward."""

    seconds: float
    nbytes: int
    module: str
    operation: str


@dataclass
class MemoryTimeline:
    """The bytes of tensors on this rank over time; `print` it for a chart.

    Tensors count from the first operation that makes or reads them, until they are freed. What libraries take in addition to
    tensors, and memory that an allocator keeps, does not count.

    Attributes:
        events: one for each operation that changed the bytes, in order.
    """

    events: list[MemoryEvent] = field(default_factory=list)

    @property
    def peak(self) -> MemoryEvent:
        """The event with most bytes; of no bytes if there was none."""
        return max(self.events, key=lambda event: event.nbytes, default=MemoryEvent(0.0, 0, "", ""))

    def __str__(self) -> str:
        peak = self.peak
        where = f" in {peak.module}" if peak.module else ""
        title = f"at most {human_bytes(peak.nbytes)}, after {peak.operation}{where}, {1e3 * peak.seconds:.3g} ms after the start"
        bars = (
            "".join(LEVELS[round((len(LEVELS) - 1) * n / peak.nbytes)] for n in self._sampled(COLUMNS))
            if peak.nbytes
            else ""
        )
        return f"{title if peak.nbytes else 'no tensors'}\n{bars}\n"

    def _repr_html_(self) -> str:
        """A chart for a notebook."""
        peak = self.peak
        if not peak.nbytes:
            return "<p>no tensors</p>"
        title = str(self).splitlines()[0]
        step = "".join(f"L{x} {100 - 100 * n / peak.nbytes:.1f}" for x, n in enumerate(self._sampled(400)))
        chart = (
            f'<svg viewBox="0 0 400 100" preserveAspectRatio="none" style="width:100%;height:8em" role="img">'
            f"<title>bytes over time</title>"
            f'<path d="M0 100{step}L400 100Z" fill="#5f6fc4"/></svg>'
        )
        largest = sorted(self.by_module().items(), key=lambda item: -item[1])[:40]
        text = "\n".join(
            f"{human_bytes(size):>12}  {module or '(outside of modules)'}" for module, size in largest
        )
        return f"<p>{title}</p>{chart}{details_html('most bytes alive, by running module', text_html(text))}"

    def by_module(self) -> dict[str, int]:
        """Running module -> the most bytes that were alive in it."""
        most: dict[str, int] = {}
        for event in self.events:
            most[event.module] = max(most.get(event.module, 0), event.nbytes)
        return most

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a counter track that Perfetto (ui.perfetto.dev) draws."""
        events = [
            {
                "ph": "C",
                "pid": 0,
                "name": "bytes of tensors",
                "ts": e.seconds * 1e6,
                "args": {"bytes": e.nbytes},
            }
            for e in self.events
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _sampled(self, count: int) -> list[int]:
        """The most bytes in each of `count` equal parts of the time."""
        most, last = [0] * count, max((e.seconds for e in self.events), default=0.0) or 1.0
        for e in self.events:
            place = min(count - 1, int(count * e.seconds / last))
            most[place] = max(most[place], e.nbytes)
        for place in range(1, count):
            # nothing changed in this part
            most[place] = most[place] or most[place - 1]
        return most


@contextlib.contextmanager
def memory() -> Iterator[MemoryTimeline]:
    """Record the bytes of tensors that are alive on this rank, operation by operation. It slows operations down."""
    timeline = MemoryTimeline()
    watch = _Watch(timeline)
    try:
        with named_modules_tracked(), watch:
            yield timeline
    finally:
        # tensors that are freed later are no part of it
        watch.closed = True


class _Watch(TorchDispatchMode):
    """Adds the storages that operations make or read, and takes them off when they are freed."""

    def __init__(self, timeline: MemoryTimeline) -> None:
        super().__init__()
        self.timeline, self.start, self.nbytes = timeline, time.perf_counter(), 0
        self.closed = False
        self.alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count."""
        if any(issubclass(t, DTensor) for t in types):
            # the operations on its local tensor come here too
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        before = self.nbytes
        for leaf in pytree.tree_leaves((args, kwargs, result)):
            # fake and meta tensors, with which programs are derived, take no memory
            if isinstance(leaf, torch.Tensor) and not is_fake(leaf) and leaf.device.type != "meta":
                if leaf.layout is torch.strided:
                    self._add(leaf)
        if self.nbytes != before or not self.timeline.events:
            self._note(str(func))
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self.alive and self.alive[key]() is storage:
            return

        def freed(_reference: Any) -> None:
            self.nbytes -= size
            self.alive.pop(key, None)
            self._note("free")

        self.nbytes += size
        self.alive[key] = weakref.ref(storage, freed)

    def _note(self, operation: str) -> None:
        if self.closed:
            return
        frame = FRAMES.current()
        module = "" if frame is None else frame.where
        self.timeline.events.append(
            MemoryEvent(time.perf_counter() - self.start, self.nbytes, module, operation)
        )
