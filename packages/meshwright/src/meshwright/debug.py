"""`mw.debug`: see what a parallel model does::

    with mw.debug.communication() as log:
        model(**batch).loss.backward()
    print(log.counts())

A log has an event for each collective: its axis, bytes, module and reason.
"""

from __future__ import annotations

from meshwright_dtensor.comm.log import CommEvent, CommLog, communication

__all__ = ["CommEvent", "CommLog", "communication"]
