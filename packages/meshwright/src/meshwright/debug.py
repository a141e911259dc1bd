"""`mw.debug`: see what a parallel model does::

    with mw.debug.communication() as log, mw.debug.memory() as timeline:
        model(**batch).loss.backward()
    print(log)
    print(timeline)
    print(mw.debug.visualize(model))
    print(mw.debug.regions(model))

A log has an event for each collective: its axis, bytes, module and reason. A timeline has the bytes of tensors on this
rank. `regions` says which modules run compiled (`compile=True`), and why others do not. In a notebook, end a cell with one of them.
"""

from __future__ import annotations

from meshwright_dtensor.comm.log import CommEvent, CommLog, communication
from meshwright_dtensor.trace.memory_timeline import MemoryEvent, MemoryTimeline, memory
from meshwright_dtensor.visualize import Picture, visualize
from meshwright_parallel.compile.report import RegionRow, Regions, regions

__all__ = [
    "CommEvent",
    "CommLog",
    "MemoryEvent",
    "MemoryTimeline",
    "Picture",
    "RegionRow",
    "Regions",
    "communication",
    "memory",
    "regions",
    "visualize",
]
