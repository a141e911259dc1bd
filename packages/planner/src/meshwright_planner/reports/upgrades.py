"""Hardware upgrades: a plan replayed on clusters that are better in one respect each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_planner.simulation.events import run
from meshwright_planner.simulation.workload import Faults, Workload

TWICE = 2.0
FULL = 0.9
"""Part of the memory above which more of it may allow a faster plan."""


@dataclass(frozen=True)
class Upgrade:
    """One change of the cluster, and the step of the same plan on it.

    Args:
        what: the change, in words.
        seconds: of a step after the change, replayed.
        saved: the part of today's step that it saves.
        today: seconds of a step on the cluster as it is, also replayed.
    """

    what: str
    seconds: float
    saved: float
    today: float

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"what": self.what, "seconds": self.seconds, "saved": self.saved, "today_seconds": self.today}


def upgrades(plan: ParallelPlan, cluster: Cluster, host: PluginHost | None = None) -> list[Upgrade]:
    """The step of the plan on clusters that are twice as good in one respect, the largest gain first.

    The plan stays the same; another plan may profit more from the change.

    Raises:
        UsageError: the plan has no predicted split of its step.
    """
    today = run(Workload(plan, cluster, host=host).programs()).seconds
    if not today:
        return []
    changes = []
    for what, faults in _changes(cluster):
        seconds = run(Workload(plan, cluster, faults, host).programs()).seconds
        changes.append(Upgrade(what, seconds, 1.0 - seconds / today, today))
    return sorted(changes, key=lambda u: (u.seconds, u.what))


def _changes(cluster: Cluster) -> Iterator[tuple[str, Faults]]:
    yield "devices twice as fast", Faults(compute=1.0 / TWICE)
    for level in cluster.links:
        yield f"{level.name} of twice the bandwidth", Faults(everywhere=frozenset({(level.name, TWICE)}))


def memory_limit(plan: ParallelPlan, cluster: Cluster | None) -> int:
    """Bytes that a rank may use: the plan's limit, else the memory of a device of `cluster`; 0 where neither is known."""
    if plan.predicted is not None and plan.predicted.limit_bytes is not None:
        return plan.predicted.limit_bytes
    return 0 if cluster is None else cluster.usable_bytes


def memory_is_full(plan: ParallelPlan, cluster: Cluster) -> bool:
    """Whether memory is so full that more of it may allow a faster plan."""
    assert plan.predicted is not None
    return plan.predicted.total_bytes > FULL * memory_limit(plan, cluster)
