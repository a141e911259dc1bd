"""How many cores there are to work on."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on; where the system does not tell (macOS, Windows), all of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
