"""`mw.debug`: see what a parallel model does.

with mw.debug.communication() as log:
    model(**batch).loss.backward()
print(log.counts())
"""

from __future__ import annotations

from meshwright_dtensor.comm.log import CommEvent, CommLog, communication

__all__ = ["CommEvent", "CommLog", "communication"]
